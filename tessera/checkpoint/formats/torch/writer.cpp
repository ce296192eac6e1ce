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

TorchArchiveWriter::TorchArchiveWriter(NewFile& file, uint64_t begin, const TorchTree& tree, std::optional<uint64_t> save)
    : zip_(file, begin) {
  const auto content = pickle::write(pickled(tree, ""));
  zip_.add(std::string(kFolder) + "data.pkl", content);
  zip_.add(std::string(kFolder) + "byteorder", "little");
  if (save) zip_.add(std::string(kFolder) + kSaveKey, std::to_string(*save));
}

Value TorchArchiveWriter::pickled(const TorchTree& tree, const std::string& name) {
  if (const auto* const json = std::get_if<nlohmann::json>(&tree.value)) return from_json(*json);
  if (const auto* const tensor = std::get_if<TorchTree::Tensor>(&tree.value)) return pickled(*tensor, name);
  const auto items_of = [&](const std::vector<TorchTree>& items) {
    std::vector<Value> result;
    for (size_t i = 0; i < items.size(); i++) result.push_back(pickled(items[i], path_of(name, std::to_string(i))));
    return result;
  };
  if (const auto* const list = std::get_if<TorchTree::List>(&tree.value)) return pickle::List{.items = items_of(list->items)};
  if (const auto* const tuple = std::get_if<TorchTree::Tuple>(&tree.value)) return pickle::Tuple{.items = items_of(tuple->items)};
  pickle::Dict result;
  for (const auto& [key, item] : std::get<TorchTree::Dict>(tree.value).entries) {
    const auto value = std::visit([](const auto& each) { return Value(each); }, key);
    result.entries.emplace_back(value, pickled(item, path_of(name, *to_name(value))));
  }
  return result;
}

/// The call by which Python makes the tensor: a view of a storage with a dtype, or of an untyped storage with a dtype beside it.
Value TorchArchiveWriter::pickled(const TorchTree::Tensor& tensor, const std::string& name) {
  const auto* const dtype = torch_dtype(tensor->dtype);
  if (dtype == nullptr) {
    throw UsageError("tensor '{}' is of dtype {}, which can't be saved; save a copy in another one", name, c10::toString(tensor->dtype));
  }
  const auto width = static_cast<int64_t>(c10::elementSize(tensor->dtype));
  const auto bytes = checked_numel(tensor->shape, width);
  if (!bytes) throw UsageError("tensor '{}' of the shape [{}] does not fit into a file", name, joined(tensor->shape));
  const auto [found, is_new] = storages_.try_emplace(tensor.get(), places_.size());
  if (is_new) places_.push_back({name, tensor});

  const bool typed = dtype->storage != nullptr;
  const Value type = pickle::Global{typed ? std::string("torch.") + dtype->storage : "torch.storage.UntypedStorage"};
  const Value storage = pickle::Storage{
      .id = pickle::Tuple{.items = {"storage", type, std::to_string(found->second), "cpu", typed ? *bytes / width : *bytes}}};
  const Value no_hooks = pickle::Object{.name = "collections.OrderedDict"};
  pickle::Object call{.name = typed ? "torch._utils._rebuild_tensor_v2" : "torch._utils._rebuild_tensor_v3",
                      .arguments = {storage, int64_t{0}, tuple_of(tensor->shape), tuple_of(strides_of(tensor->shape)), false, no_hooks}};
  if (!typed) call.arguments.push_back(pickle::Global{std::string("torch.") + dtype->name});
  return call;
}

void TorchArchiveWriter::write(const at::Tensor& tensor) {
  if (next_ == places_.size()) throw UsageError("the file has all its {} tensors already", next_);
  const auto& [name, expected] = places_[next_];
  if (tensor.scalar_type() != expected->dtype || tensor.sizes() != at::IntArrayRef(expected->shape)) {
    throw UsageError("the next tensor is '{}', {} of [{}], but was given {} of [{}]", name, c10::toString(expected->dtype),
                     joined(expected->shape), c10::toString(tensor.scalar_type()), joined(tensor.sizes()));
  }
  append(tensor);
}

void TorchArchiveWriter::append(const at::Tensor& values) {
  if (next_ == places_.size()) throw UsageError("the file has all its {} tensors already", next_);
  const auto& [name, expected] = places_[next_];
  const auto numel = c10::multiply_integers(expected->shape);
  if (values.scalar_type() != expected->dtype || values.numel() > numel - written_) {
    throw UsageError("'{}' lacks {} values of {}, but was given {} of {}", name, numel - written_, c10::toString(expected->dtype),
                     values.numel(), c10::toString(values.scalar_type()));
  }
  const auto plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous();
  if (written_ == 0) zip_.begin(entry_name(next_), static_cast<uint64_t>(numel) * plain.element_size());
  zip_.append(std::span(static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes()));
  written_ += values.numel();
  if (written_ < numel) return;
  zip_.end();
  next_++;
  written_ = 0;
}

std::vector<uint64_t> TorchArchiveWriter::reserve() {
  std::vector<uint64_t> reserved;
  first_reserved_ = zip_.entries();
  for (; next_ < places_.size(); next_++) {
    const auto& tensor = *places_[next_].tensor;
    const auto bytes = static_cast<uint64_t>(c10::multiply_integers(tensor.shape)) * c10::elementSize(tensor.dtype);
    reserved.push_back(zip_.reserve(entry_name(next_), bytes));
  }
  return reserved;
}

uint64_t TorchArchiveWriter::close(std::span<const uint32_t> checksums) {
  for (size_t i = 0; i < checksums.size(); i++) zip_.set_checksum(first_reserved_ + i, checksums[i]);
  return close();
}

uint64_t TorchArchiveWriter::close() {
  if (next_ < places_.size()) {
    throw UsageError("closed after {} of {} tensors; '{}' is missing", next_, places_.size(), places_[next_].name);
  }
  zip_.add(std::string(kFolder) + "version", "3\n");
  return zip_.close();
}

}  // namespace tessera::checkpoint
