#include "tessera/checkpoint/formats/torch/archive.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kContent = "/data.pkl";

/// Throws IoError unless the bytes are a zip archive, and names other formats that .pt files may have.
void expect_zip(const InputFile& file, uint64_t begin, uint64_t bytes, const std::string& where) {
  constexpr uint64_t kHead = 512, kTarMark = 257;
  std::string head(std::min(kHead, begin > file.size() ? 0 : std::min(bytes, file.size() - begin)), '\0');
  file.read(head.data(), head.size(), begin);
  if (head.starts_with("PK")) return;
  const auto refuse = [&](const char* what) {
    throw IoError("{} {}; load it in Python and save it again with today's torch.save", where, what);
  };
  if (head.starts_with("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19")) refuse("is in the format that torch.save had before PyTorch 1.6");
  if (head.size() > kTarMark && std::string_view(head).substr(kTarMark).starts_with("ustar")) {
    refuse("is a tar archive, as torch.save wrote them before 2017");
  }
  throw IoError("{} is no file of torch.save: it is no zip archive{}", where, head.empty() ? ", but empty" : "");
}

/// The folder in the archive in which everything is.
std::string folder_of(const std::map<std::string, ZipEntry>& entries, const std::string& where) {
  const auto found = std::ranges::find_if(entries, [](const auto& entry) {
    return entry.first.ends_with(kContent) && entry.first.find('/') + kContent.size() == entry.first.size();
  });
  if (found == entries.end()) throw IoError("{} is a zip archive, but none of torch.save: it has no data.pkl", where);
  return found->first.substr(0, found->first.size() - kContent.size() + 1);
}

}  // namespace

TorchArchive::TorchArchive(const InputFile& file, uint64_t begin, uint64_t bytes, const pickle::Globals& globals, std::string where)
    : where_(std::move(where)) {
  expect_zip(file, begin, bytes, where_);
  auto zip = read_zip(file, begin, bytes, where_);
  entries_ = std::move(zip.entries);
  checksum_ = std::move(zip.checksum);
  folder_ = folder_of(entries_, where_);
  for (const auto& [name, entry] : entries_) {
    const bool is_code = name.starts_with(folder_ + "code/");  // of TorchScript, which is not read
    if (entry.packed && !is_code)
      throw IoError("{} is compressed, which torch.save never does; load it in Python and save it again", where_);
  }
  const auto order = entries_.find(folder_ + "byteorder");
  if (order != entries_.end() && read_entry(file, order->second, where_) != "little") {
    throw IoError("{} has another byte order than this machine; save it again on a machine with this one", where_);
  }
  if (const auto save = entries_.find(folder_ + kSaveKey); save != entries_.end())
    save_ = save_number(read_entry(file, save->second, where_), where_);
  const auto pickled = read_entry(file, entries_.at(folder_ + "data.pkl"), where_);
  content_bytes_ = pickled.size();
  content_ = pickle::read(std::as_bytes(std::span(pickled)), globals, where_);
}

void TorchArchive::damaged(const std::string& name, const std::string& why) const {
  throw IoError("{} is damaged: the tensor '{}' {}", where_, name, why);
}

std::optional<ArchivedTensor> TorchArchive::tensor(const pickle::Value& value, const std::string& name) const {
  const auto* const object = value.as<pickle::Object>();
  return object == nullptr ? std::nullopt : tensor_of_object(*object, name);
}

std::optional<ArchivedTensor> TorchArchive::tensor_of_object(const pickle::Object& object, const std::string& name) const {
  const auto& made = object.name;
  const auto& arguments = object.arguments;
  if (made == "torch._utils._rebuild_tensor_v2" || made == "torch._utils._rebuild_tensor_v3" || made == "torch._utils._rebuild_tensor") {
    return view_of_storage(object, name);
  }
  if (made == "torch._utils._rebuild_parameter" || made == "torch._utils._rebuild_parameter_with_state") {
    if (arguments.empty() || arguments[0].as<pickle::Object>() == nullptr) damaged(name, "is a parameter without values");
    return tensor(arguments[0], name);
  }
  if (made == "torch._tensor._rebuild_from_type_v2") {  // a tensor with attributes: the function that makes it, its class, the arguments
    const auto* const function = arguments.size() < 3 ? nullptr : arguments[0].as<pickle::Global>();
    const auto* const inner = arguments.size() < 3 ? nullptr : arguments[2].as<pickle::Tuple>();
    if (function == nullptr || inner == nullptr || function->name == made) damaged(name, "is not made as tensors are");
    return tensor_of_object({.name = function->name, .arguments = inner->items}, name);
  }
  if (made == "torch._utils._rebuild_qtensor" || made == "torch._utils._rebuild_sparse_tensor") {
    throw IoError("{} has a {} tensor '{}', which can't be read; save {}", where_, made.ends_with("qtensor") ? "quantized" : "sparse", name,
                  made.ends_with("qtensor") ? "its dequantize()" : "its to_dense()");
  }
  return std::nullopt;
}

/// From (storage, offset, shape, strides, requires_grad, hooks[, dtype][, attributes]).
ArchivedTensor TorchArchive::view_of_storage(const pickle::Object& object, const std::string& name) const {
  const auto& arguments = object.arguments;
  const bool names_dtype = object.name.ends_with("_v3");
  const size_t attributes = names_dtype ? 7 : 6;
  const auto* const offset = arguments.size() < (names_dtype ? 7 : 4) ? nullptr : arguments[1].as<int64_t>();
  if (offset == nullptr) damaged(name, "is not made as tensors are");
  const auto shape = to_integers(arguments[2]), strides = to_integers(arguments[3]);
  if (!shape || !strides || shape->size() != strides->size()) damaged(name, "has no shape or strides");
  if (arguments.size() > attributes) {
    const auto* const dict = arguments[attributes].as<pickle::Dict>();
    if (dict != nullptr && !dict->entries.empty()) {
      throw IoError(
          "{} has a tensor '{}' whose conjugate or negative is still to be computed; save its resolve_conj() or "
          "resolve_neg()",
          where_, name);
    }
  }
  std::optional<at::ScalarType> dtype;
  if (names_dtype) {
    const auto* const global = arguments[6].as<pickle::Global>();
    const auto* const known = global == nullptr ? nullptr : torch_dtype_named(global->name);
    if (known == nullptr) damaged(name, "has no dtype");
    dtype = known->type;
  }
  const auto& entry = storage(arguments[0], dtype, name);

  const auto width = static_cast<int64_t>(c10::elementSize(*dtype));
  const auto numel = checked_numel(*shape, width);
  int64_t last = *offset;
  bool overflows = !numel || *offset < 0;
  for (size_t d = 0; d < shape->size() && !overflows; d++) {
    int64_t steps = 0;
    overflows = (*strides)[d] < 0 || __builtin_mul_overflow(std::max<int64_t>((*shape)[d], 1) - 1, (*strides)[d], &steps) ||
                __builtin_add_overflow(last, steps, &last);
  }
  const auto values = static_cast<int64_t>(entry.bytes) / width;
  if (overflows || (*numel > 0 && last >= values) || *offset > values) {
    damaged(name, fmt::format("of the shape [{}] has values outside of its storage of {} bytes", fmt::join(*shape, ", "), entry.bytes));
  }
  return {.dtype = *dtype,
          .shape = *shape,
          .strides = *strides,
          .begin = entry.begin + static_cast<uint64_t>(*offset * width),
          .storage = entry};
}

/// From ("storage", class, key, device, number of values). A class of storages has a dtype, unless it is of bytes.
const ZipEntry& TorchArchive::storage(const pickle::Value& value, std::optional<at::ScalarType>& dtype, const std::string& name) const {
  const auto* const reference = value.as<pickle::Storage>();
  const auto* const id = reference == nullptr ? nullptr : reference->id.as<pickle::Tuple>();
  if (id == nullptr || id->items.size() != 5) damaged(name, "has no storage");
  const auto* const type = id->items[1].as<pickle::Global>();
  const auto* const key = id->items[2].as<std::string>();
  const auto* const count = id->items[4].as<int64_t>();
  if (type == nullptr || key == nullptr || count == nullptr) damaged(name, "has no storage");
  int64_t width = 1;
  if (const auto* const typed = torch_dtype_of_storage(type->name)) {
    if (!dtype) dtype = typed->type;
    width = static_cast<int64_t>(c10::elementSize(typed->type));
  }
  if (!dtype) damaged(name, fmt::format("has a storage of the class {}", type->name));
  const auto found = entries_.find(fmt::format("{}data/{}", folder_, *key));
  if (found == entries_.end()) damaged(name, fmt::format("has its values in data/{}, which is missing", *key));
  int64_t bytes = 0;
  if (__builtin_mul_overflow(*count, width, &bytes) || bytes < 0 || static_cast<uint64_t>(bytes) != found->second.bytes) {
    damaged(name, fmt::format("should have a storage of {} values, but data/{} has {} bytes", *count, *key, found->second.bytes));
  }
  return found->second;
}

}  // namespace tessera::checkpoint
