#include "tessera/checkpoint/formats/torch/writer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {
namespace {

using pickle::Value;

constexpr const char* kFolder = "archive/";

std::string entry_name(size_t tensor) {
  return fmt::format("{}data/{}", kFolder, tensor);
}

std::string path_of(const std::string& name, const std::string& key) {
  return name.empty() ? key : name + "." + key;
}

Value tuple_of(const std::vector<int64_t>& numbers) {
  return pickle::Tuple{.items = {numbers.begin(), numbers.end()}};
}

std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return strides;
}

}  // namespace

TorchArchiveWriter::TorchArchiveWriter(NewFile& file, uint64_t begin, const Value& content, std::optional<uint64_t> save)
    : zip_(file, begin) {
  zip_.add(std::string(kFolder) + "data.pkl", pickle::write(with_calls(content, "")));
  tensors_.emplace(file.part(), std::move(entries_));
  zip_.add(std::string(kFolder) + "byteorder", "little");
  if (save) zip_.add(std::string(kFolder) + kSaveKey, std::to_string(*save));
}

Value TorchArchiveWriter::with_calls(const Value& value, const std::string& name) {
  if (const auto* const tensor = value.as<pickle::Tensor>()) return call_of(*tensor, name);
  if (const auto* const dict = value.as<pickle::Dict>()) {
    pickle::Dict result;
    for (const auto& [key, item] : dict->entries)
      result.entries.emplace_back(key, with_calls(item, path_of(name, to_name(key).value_or(std::string(key.kind())))));
    return result;
  }
  const auto* const items = value.items();
  if (items == nullptr) return value;
  std::vector<Value> made;
  for (size_t i = 0; i < items->size(); i++) made.push_back(with_calls((*items)[i], path_of(name, std::to_string(i))));
  if (value.as<pickle::Tuple>() != nullptr) return pickle::Tuple{.items = std::move(made)};
  return pickle::List{.items = std::move(made)};
}

/// Returns the call by which Python makes the tensor: a view of a typed storage, or of an untyped one with the dtype as an argument.
Value TorchArchiveWriter::call_of(const pickle::Tensor& tensor, const std::string& name) {
  const auto* const dtype = torch_dtype(tensor.dtype);
  if (dtype == nullptr) {
    throw UsageError("tensor '{}' is of dtype {}, which can't be saved; save a copy in another dtype", name, c10::toString(tensor.dtype));
  }
  const auto width = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const auto bytes = checked_numel(tensor.shape, width);
  if (!bytes) throw UsageError("tensor '{}' of the shape [{}] does not fit into a file", name, joined(tensor.shape));
  const auto [found, is_new] = storages_.try_emplace(&tensor, entries_.size());
  if (is_new) entries_.push_back({.name = name, .dtype = tensor.dtype, .sizes = tensor.shape});

  const bool typed = dtype->storage != nullptr;
  const Value type = pickle::Global{typed ? std::string("torch.") + dtype->storage : "torch.storage.UntypedStorage"};
  const Value storage = pickle::Storage{
      .id = pickle::Tuple{.items = {"storage", type, std::to_string(found->second), "cpu", typed ? *bytes / width : *bytes}}};
  const Value no_hooks = pickle::Object{.name = "collections.OrderedDict"};
  pickle::Object call{.name = typed ? "torch._utils._rebuild_tensor_v2" : "torch._utils._rebuild_tensor_v3",
                      .arguments = {storage, int64_t{0}, tuple_of(tensor.shape), tuple_of(strides_of(tensor.shape)), false, no_hooks}};
  if (!typed) call.arguments.push_back(pickle::Global{std::string("torch.") + dtype->name});
  return call;
}

void TorchArchiveWriter::write(const at::Tensor& tensor) {
  tensors_->expect_whole(tensor);
  append(tensor);
}

void TorchArchiveWriter::append(const at::Tensor& values) {
  const auto [plain, number, begins, ends] = tensors_->take(values);
  if (begins) zip_.begin(entry_name(number), static_cast<uint64_t>(tensors_->all()[number].bytes()));
  zip_.append(std::span(static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes()));
  if (ends) zip_.end();
}

std::vector<uint64_t> TorchArchiveWriter::reserve() {
  std::vector<uint64_t> reserved;
  first_reserved_ = zip_.entries();
  const auto rest = tensors_->take_rest();
  const auto first = tensors_->all().size() - rest.size();
  for (size_t i = 0; i < rest.size(); i++) reserved.push_back(zip_.reserve(entry_name(first + i), static_cast<uint64_t>(rest[i].bytes())));
  return reserved;
}

uint64_t TorchArchiveWriter::close(std::span<const uint32_t> checksums) {
  for (size_t i = 0; i < checksums.size(); i++) zip_.set_checksum(first_reserved_ + i, checksums[i]);
  tensors_->expect_none();
  zip_.add(std::string(kFolder) + "version", "3\n");
  return zip_.close();
}

}  // namespace tessera::checkpoint
