#include "tessera/checkpoint/formats/torch/file.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/torch/archive.h"
#include "tessera/checkpoint/formats/torch/pickle.h"

namespace tessera::checkpoint {
namespace {

using pickle::Value;

/// Turns the content of an archive into a catalog.
class TorchFileReader {
 public:
  TorchFileReader(const std::filesystem::path& path, const TorchArchive& archive)
      : archive_(archive), where_(path.string()), longest_(kLettersApiece * archive.content_bytes() + kAlways) {
    catalog_.files = {path};
    note_save(catalog_, archive.save(), path);
  }

  Catalog take() {
    const auto& content = unwrapped(archive_.content());
    const bool is_tensor = archive_.tensor(content, "").has_value();
    if (const auto* const object = content.as<pickle::Object>(); object != nullptr && !is_tensor) refuse(object->name);
    const auto* const dict = content.as<pickle::Dict>();
    if (dict == nullptr)
      throw IoError("{} holds {} instead of a dict of tensors", where_, is_tensor ? "one tensor without a name" : content.kind());
    add_entries("", *dict, is_module(archive_.content()));
    // The object that was left out may be the model.
    if (catalog_.tensors.empty() && !foreign_.empty()) refuse(foreign_);
    return std::move(catalog_);
  }

 private:
  // These bound the letters of all names together, because names may share their beginnings in the file, but not in the catalog.
  static constexpr size_t kLettersApiece = 64, kAlways = 1 << 20;

  [[noreturn]] void refuse(const std::string& global) const {
    throw IoError(
        "{} refers to {}, for which Python would run code of the file's choice, so it is refused; if you trust the file, load "
        "it in Python and save it again with tensors and plain values only, such as model.state_dict()",
        where_, global);
  }

  void add(const std::string& name, const Value& given) {
    const auto& value = unwrapped(given);
    letters_ += name.size();
    if (letters_ > longest_) throw IoError("{} is damaged: its names are far longer than the file", where_);
    const auto* const items = value.items();
    const auto* const dict = value.as<pickle::Dict>();
    if (const auto tensor = archive_.tensor(value, name)) {
      add_tensor(name, *tensor);
    } else if (dict != nullptr && (is_module(given) || !dict->entries.empty())) {
      add_entries(name + ".", *dict, is_module(given));
    } else if (items != nullptr && has_parts(*items, name)) {
      for (size_t i = 0; i < items->size(); i++) add(fmt::format("{}.{}", name, i), (*items)[i]);
    } else {
      add_value(name, value);
    }
  }

  /// Adds the entries of a dict. Of a module only tensors and submodules are added: the rest belongs to its code.
  void add_entries(const std::string& prefix, const pickle::Dict& dict, bool of_module) {
    for (const auto& [key, value] : dict.entries) {
      if (of_module && !is_module(value) && !archive_.tensor(value, prefix)) continue;
      const auto part = to_name(key);
      if (!part) {
        throw IoError("{} has {} as a key of '{}'; only texts and integers can be parts of names", where_, key.kind(), prefix);
      }
      add(prefix + *part, value);
    }
  }

  /// Whether there are tensors or dicts among the items, or in lists among the items.
  bool has_parts(const std::vector<Value>& items, const std::string& name) const {
    return std::ranges::any_of(items, [&](const Value& given) {
      const auto& item = unwrapped(given);
      return item.as<pickle::Dict>() != nullptr || archive_.tensor(item, name) ||
             (item.items() != nullptr && has_parts(*item.items(), name));
    });
  }

  void add_tensor(const std::string& name, const ArchivedTensor& tensor) {
    expect_new(name);
    const auto [first, is_new] =
        names_.try_emplace(std::tuple(tensor.storage.begin, tensor.begin, tensor.dtype, tensor.shape, tensor.strides), name);
    if (!is_new) {
      catalog_.aliases.emplace(name, first->second);
      return;
    }
    catalog_.tensors.emplace(name, StoredTensor{.dtype = tensor.dtype, .shape = tensor.shape, .boxes = {tensor.stored_in(0)}});
    if (storages_.insert(tensor.storage.begin).second) tensor.add_checksum(catalog_, 0, name);
  }

  void add_value(const std::string& name, const Value& value) {
    expect_new(name);
    if (auto json = to_json(value)) {
      catalog_.values.emplace(name, std::move(*json));
      return;
    }
    const auto* const object = value.as<pickle::Object>();
    const auto* const global = value.as<pickle::Global>();
    const auto of = object != nullptr ? object->name : global != nullptr ? global->name : std::string();
    // An object of torch that could not be read may be a tensor, so it is not left out in silence.
    if (object != nullptr && torch_globals(of))
      throw IoError("{} has {} at '{}', which is neither a tensor nor a plain value", where_, value.kind(), name);
    if (foreign_.empty()) foreign_ = of;
    catalog_.left_out.emplace(name, of.empty() ? kNoPlainData : fmt::format("{}, {}", kNoPlainData, of));
  }

  void expect_new(const std::string& name) const {
    if (catalog_.tensors.contains(name) || catalog_.left_out.contains(name) || catalog_.values.contains(name) ||
        catalog_.aliases.contains(name)) {
      throw IoError("{} has two values whose keys, joined by dots, are '{}'", where_, name);
    }
  }

  const TorchArchive& archive_;
  const std::string where_;
  const size_t longest_;
  size_t letters_ = 0;
  std::string foreign_;  // the class of the first object that is left out
  Catalog catalog_;
  std::map<std::tuple<uint64_t, uint64_t, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>>, std::string> names_;
  std::set<uint64_t> storages_;
};

}  // namespace

Catalog read_torch_file(const std::filesystem::path& path) {
  return TorchFileReader(path, TorchArchive(InputFile(path))).take();
}

std::vector<ReservedBytes> TorchFileWriter::reserve() {
  std::vector<ReservedBytes> reserved;
  for (const auto offset : archive_.reserve()) reserved.push_back({.file = file_.part(), .offset = offset});
  return reserved;
}

void TorchFileWriter::close(std::span<const std::string> checksums) {
  std::vector<uint32_t> numbers;
  for (const auto& text : checksums) numbers.push_back(static_cast<uint32_t>(std::stoul(text, nullptr, 16)));
  archive_.close(numbers);
  file_.commit();
}

}  // namespace tessera::checkpoint
