#include "tessera/checkpoint/formats/torch/archive.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch/pickle.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kContent = "/data.pkl";

/// Throws IoError unless the bytes are a zip archive. If the file is of an older torch.save, the error names its format.
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
  throw IoError("{} is not a file of torch.save: it is not a zip archive{}", where, head.empty() ? ", but empty" : "");
}

/// Returns the folder in the archive that has all entries, with a slash at its end.
std::string folder_of(const std::map<std::string, ZipEntry>& entries, const std::string& where) {
  const auto found = std::ranges::find_if(entries, [](const auto& entry) {
    return entry.first.ends_with(kContent) && entry.first.find('/') + kContent.size() == entry.first.size();
  });
  if (found == entries.end()) throw IoError("{} is a zip archive, but not one of torch.save: it has no data.pkl", where);
  return found->first.substr(0, found->first.size() - kContent.size() + 1);
}

}  // namespace

void ArchivedTensor::add_checksum(Catalog& catalog, size_t file, const std::string& name) const {
  if (storage.crc32 == 0) return;
  catalog.checksums.push_back(
      {.file = file, .begin = storage.begin, .bytes = storage.bytes, .checksum = fmt::format("{:08x}", storage.crc32), .name = name});
}

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
    throw IoError("{} has another byte order than this machine; save it again on a little-endian machine", where_);
  }
  if (const auto save = entries_.find(folder_ + kSaveKey); save != entries_.end())
    save_ = save_number(read_entry(file, save->second, where_), where_);
  const auto pickled = read_entry(file, entries_.at(folder_ + "data.pkl"), where_);
  content_bytes_ = pickled.size();
  content_ = pickle::read(std::as_bytes(std::span(pickled)), globals, where_);
}

TorchArchive::TorchArchive(const InputFile& file) : TorchArchive(file, 0, file.size(), any_globals, file.path().string()) {}

std::optional<ArchivedTensor> TorchArchive::tensor(const pickle::Value& value, const std::string& name) const {
  const auto* const object = value.as<pickle::Object>();
  if (object == nullptr) return std::nullopt;
  const auto made = rebuilt_by(object->name);
  const Damage damaged(fmt::format("{} is damaged: the tensor '{}' ", where_, name));
  if (made == "tensor_v2" || made == "tensor_v3" || made == "tensor") return view_of_storage(value, made == "tensor_v3", name, damaged);
  if (made == "parameter" || made == "parameter_with_state") {
    if (value[0].as<pickle::Object>() == nullptr) damaged("is a parameter without values");
    return tensor(value[0], name);
  }
  if (object->name ==
      "torch._tensor._rebuild_from_type_v2") {  // takes a function that makes a tensor, the tensor's class, and the arguments
    const auto* const function = value[0].as<pickle::Global>();
    const auto* const inner = value[2].as<pickle::Tuple>();
    if (function == nullptr || inner == nullptr || function->name == object->name) damaged("is not built as torch.save builds tensors");
    return tensor(pickle::Object{.name = function->name, .arguments = inner->items}, name);
  }
  const bool is_quantized = made == "qtensor";
  if (is_quantized || made == "sparse_tensor") {
    throw IoError("{} has a {} tensor '{}', which can't be read; save {}", where_, is_quantized ? "quantized" : "sparse", name,
                  is_quantized ? "its dequantize()" : "its to_dense()");
  }
  return std::nullopt;
}

/// Reads the arguments of torch's _rebuild_tensor functions: (storage, offset, shape, strides, requires_grad, hooks[, dtype][,
/// attributes]).
ArchivedTensor TorchArchive::view_of_storage(const pickle::Value& made, bool names_dtype, const std::string& name,
                                             const Damage& damaged) const {
  const auto* const offset = made[1].as<int64_t>();
  if (offset == nullptr) damaged("is not built as torch.save builds tensors");
  const auto shape = to_integers(made[2]), strides = to_integers(made[3]);
  if (!shape || !strides || shape->size() != strides->size()) damaged("has no shape or strides");
  const auto* const attributes = made[names_dtype ? 7 : 6].as<pickle::Dict>();
  if (attributes != nullptr && !attributes->entries.empty()) {
    throw IoError("{} has a tensor '{}' whose conjugate or negative is still to be computed; save its resolve_conj() or resolve_neg()",
                  where_, name);
  }
  std::optional<at::ScalarType> dtype;
  if (names_dtype) {
    dtype = to_dtype(made[6]);
    if (!dtype) damaged("has no dtype");
  }
  const auto& entry = storage(made[0], dtype, damaged);

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
  if (overflows || (*numel > 0 && last >= values) || *offset > values)
    damaged("of the shape [{}] has values outside of its storage of {} bytes", joined(*shape), entry.bytes);
  return {.dtype = *dtype,
          .shape = *shape,
          .strides = *strides,
          .begin = entry.begin + static_cast<uint64_t>(*offset * width),
          .storage = entry};
}

/// Reads the id of a storage: ("storage", class, key, device, number of values). If no dtype is given, takes the dtype of the class, which
/// the class of untyped storages lacks.
const ZipEntry& TorchArchive::storage(const pickle::Value& value, std::optional<at::ScalarType>& dtype, const Damage& damaged) const {
  const auto* const reference = value.as<pickle::Storage>();
  if (reference == nullptr) damaged("has no storage");
  const auto* const type = reference->id[1].as<pickle::Global>();
  const auto* const key = reference->id[2].as<std::string>();
  const auto* const count = reference->id[4].as<int64_t>();
  if (type == nullptr || key == nullptr || count == nullptr) damaged("has no storage");
  int64_t width = 1;
  if (const auto* const typed = torch_dtype_of_storage(type->name)) {
    if (!dtype) dtype = typed->type;
    width = static_cast<int64_t>(c10::elementSize(typed->type));
  }
  if (!dtype) damaged("has a storage of the class {}, which has no known dtype", type->name);
  const auto found = entries_.find(fmt::format("{}data/{}", folder_, *key));
  if (found == entries_.end()) damaged("has its values in data/{}, which is missing", *key);
  int64_t bytes = 0;
  if (__builtin_mul_overflow(*count, width, &bytes) || bytes < 0 || static_cast<uint64_t>(bytes) != found->second.bytes)
    damaged("should have a storage of {} values, but data/{} has {} bytes", *count, *key, found->second.bytes);
  return found->second;
}

}  // namespace tessera::checkpoint
