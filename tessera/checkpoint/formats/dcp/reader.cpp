// Reads folders of torch.distributed.checkpoint: their .metadata, and the values in .distcp files.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/damage.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/dcp/names.h"
#include "tessera/checkpoint/formats/torch/archive.h"
#include "tessera/checkpoint/formats/torch/pickle.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using pickle::Value;

// The last five occur in memory formats and in the folder's path, neither of which Tessera uses.
constexpr auto kClasses = std::to_array<std::string_view>(
    {dcp::kMetadata, dcp::kTensor, dcp::kBytes, dcp::kChunk, dcp::kProperties, dcp::kMemoryFormat, dcp::kIndex, dcp::kStorageMeta,
     dcp::kStorageInfo, dcp::kOldProperties, dcp::kOldMemoryFormat, "builtins.getattr", "pathlib.PosixPath", "pathlib._local.PosixPath",
     "pathlib.WindowsPath", "pathlib._local.WindowsPath"});

std::optional<pickle::Meaning> metadata_globals(const std::string& name) {
  return std::ranges::find(kClasses, name) == kClasses.end() ? torch_globals(name) : pickle::Meaning::Object;
}

class DcpReader {
 public:
  explicit DcpReader(fs::path folder) : folder_(std::move(folder)), path_(folder_ / dcp::kFile) {}

  Catalog read() {
    if (!is_there(path_)) {
      throw IoError("{} is not a checkpoint of torch.distributed.checkpoint, or was not finished: it has no {}", folder_, dcp::kFile);
    }
    const auto bytes = InputFile(path_).read_all();
    const auto root = pickle::read(std::as_bytes(std::span(bytes)), metadata_globals, path_.string());
    const auto& metadata = fields_of(root, dcp::kMetadata, "its content");
    expect_known_version(metadata);
    const auto& storage_data = get<pickle::Dict>(metadata, "storage_data", "a dict");
    if (const auto* const note = metadata.find(dcp::kNote)) take_note(*note, bytes, storage_data.entries.size());
    take_places(storage_data);
    for (const auto& [key, entry] : get<pickle::Dict>(metadata, "state_dict_metadata", "a dict").entries) {
      const auto* const name = key.as<std::string>();
      const auto* const object = entry.as<pickle::Object>();
      if (name == nullptr || object == nullptr) damaged_("state_dict_metadata has {} for {}", entry.kind(), key.kind());
      if (catalog_.tensors.contains(*name) || !seen_.insert(*name).second) damaged_("'{}' occurs twice", *name);
      if (object->name == dcp::kBytes) {
        add_value(*name);
      } else {
        add_tensor(*name, fields_of(entry, dcp::kTensor, *name));
      }
    }
    return std::move(catalog_);
  }

 private:
  /// The place of an archive: its file, and its bytes in the file.
  struct Place {
    std::string file;
    uint64_t offset = 0, bytes = 0;
    std::string checksum = {};  // TorchArchive::checksum; empty if it is not known
  };
  using Key = std::pair<std::string, std::optional<std::vector<int64_t>>>;  // the name, and the offsets of a part of a tensor

  /// Returns the fields of `value`, which must be an object of this class.
  const pickle::Dict& fields_of(const Value& value, std::string_view of_class, const std::string& what) const {
    const auto* const object = value.as<pickle::Object>();
    const auto* const fields = object == nullptr ? nullptr : object->state.as<pickle::Dict>();
    if (fields == nullptr || object->name != of_class)
      damaged_("'{}' is {} instead of a {}", what, object == nullptr ? value.kind() : std::string_view(object->name), of_class);
    return *fields;
  }
  const Value& field(const pickle::Dict& fields, std::string_view name) const {
    const auto* const found = fields.find(name);
    if (found == nullptr) damaged_("an object has no field '{}'", name);
    return *found;
  }
  template <class T>
  const T& get(const pickle::Dict& fields, std::string_view name, std::string_view what) const {
    const auto* const value = field(fields, name).as<T>();
    if (value == nullptr) damaged_("{} is {} instead of {}", name, field(fields, name).kind(), what);
    return *value;
  }
  const std::string& text_in(const pickle::Dict& fields, std::string_view name) const { return get<std::string>(fields, name, "a text"); }
  uint64_t number_in(const pickle::Dict& fields, std::string_view name) const {
    const auto number = get<int64_t>(fields, name, "a number of bytes");
    if (number < 0) damaged_("{} is negative, so it is not a number of bytes", name);
    return static_cast<uint64_t>(number);
  }
  std::vector<int64_t> sizes_in(const pickle::Dict& fields, std::string_view name) const {
    auto sizes = to_integers(field(fields, name));
    if (!sizes) damaged_("{} is {} instead of sizes", name, field(fields, name).kind());
    return std::move(*sizes);
  }

  void expect_known_version(const pickle::Dict& metadata) const {
    const auto* const version = metadata.find("version");
    if (version == nullptr || version->is_none()) return;
    const auto* const text = version->as<std::string>();
    if (text != nullptr && *text == dcp::kVersion) return;
    throw IoError(
        "{} has the version {}, but Tessera reads only {} and older files, which have no version; load it with the PyTorch that wrote "
        "it and save it with torch.save",
        path_, text == nullptr ? std::string(version->kind()) : "'" + *text + "'", dcp::kVersion);
  }

  /// Takes the checksums and the number of the save, if Tessera wrote the folder.
  void take_note(const Value& value, std::string_view text, size_t archives) {
    const auto* const note = value.as<pickle::Dict>();
    if (note == nullptr) return;  // the attribute is not Tessera's
    checksums_ = text_in(*note, dcp::kChecksums);
    try {
      expect_as_written(text, checksums_, archives, dcp::kNote);
    } catch (const IoError& error) {
      damaged_("{}", error.what());
    }
    catalog_.save = {.number = number_in(*note, dcp::kSave), .file = path_};
  }

  void take_places(const pickle::Dict& storage_data) {
    size_t number = 0;  // index of the archive's checksum
    for (const auto& [index, info] : storage_data.entries) {
      const auto& key = fields_of(index, dcp::kIndex, "a key of storage_data");
      const auto& place = fields_of(info, dcp::kStorageInfo, "an entry of storage_data");
      const auto& name = text_in(key, "fqn");
      const auto* const offset = key.find("offset");
      auto part = offset == nullptr || offset->is_none() ? std::nullopt : std::optional(sizes_in(key, "offset"));
      const auto* const transforms = place.find("transform_descriptors");
      if (transforms != nullptr && !transforms->is_none()) {
        throw IoError("{}: '{}' was saved with a transform (such as compression), which Tessera can't read; save without it", path_, name);
      }
      const auto& file = text_in(place, "relative_path");
      if (file.empty() || file.starts_with('.') || file.find('/') != std::string::npos || file.find('\0') != std::string::npos) {
        damaged_("'{}' should be in the file '{}', which is not a file of this folder", name, file);
      }
      places_[{name, std::move(part)}] = {.file = file,
                                          .offset = number_in(place, "offset"),
                                          .bytes = number_in(place, "length"),
                                          .checksum = checksums_.empty() ? "" : checksum_at(checksums_, number++)};
    }
  }

  /// Returns the number of a file in the catalog, to which it adds a new file.
  size_t number_of(const std::string& name) {
    const auto [found, is_new] = numbers_.try_emplace(name, files_.size());
    if (is_new) {
      files_.emplace_back(folder_ / name);
      catalog_.files.push_back(folder_ / name);
    }
    return found->second;
  }

  struct Item {
    size_t file;
    TorchArchive archive;
  };
  Item item(const Key& key, const pickle::Globals& globals) {
    const auto found = places_.find(key);
    if (found == places_.end()) damaged_("it does not say where '{}' is", key.first);
    const auto& [name, offset, bytes, checksum] = found->second;
    const auto number = number_of(name);
    const auto where = fmt::format("{} at byte {}, where '{}' is,", (folder_ / name).string(), offset, key.first);
    Item item{.file = number, .archive = TorchArchive(files_[number], offset, bytes, globals, where)};
    if (checksum.empty() || checksum == item.archive.checksum()) return item;
    throw IoError("{} has other content than {} says; it is damaged, or of another save", where, path_);
  }

  void add_value(const std::string& name) {
    auto json = to_json(item({name, std::nullopt}, any_globals).archive.content());
    if (json) {
      catalog_.values.emplace(name, std::move(*json));
    } else {
      catalog_.left_out.emplace(name, kNoPlainData);
    }
  }

  void add_tensor(const std::string& name, const pickle::Dict& fields) {
    StoredTensor tensor{.dtype = dtype_of(field(fields, "properties"), name), .shape = sizes_in(fields, "size")};
    if (!checked_numel(tensor.shape, static_cast<int64_t>(c10::elementSize(tensor.dtype)))) damaged_("'{}' has an impossible size", name);
    for (const auto& chunk : get<pickle::List>(fields, "chunks", "a list").items) {
      const auto& places = fields_of(chunk, dcp::kChunk, name);
      const TensorSlice box{.shape = tensor.shape, .offsets = sizes_in(places, "offsets"), .sizes = sizes_in(places, "sizes")};
      if (box.offsets.size() != box.shape.size() || box.sizes.size() != box.shape.size() || !box.fits()) {
        damaged_("'{}' has a chunk outside of its shape [{}]", name, joined(tensor.shape));
      }
      if (box.numel() > 0) tensor.boxes.push_back(stored(name, box, tensor.dtype));
    }
    catalog_.tensors.emplace(name, std::move(tensor));
  }

  /// Returns the dtype in TensorProperties(dtype, ...).
  at::ScalarType dtype_of(const Value& value, const std::string& name) const {
    const auto* const object = value.as<pickle::Object>();
    const auto dtype = object == nullptr ? std::nullopt : to_dtype(object->state[0]);
    if (!dtype) damaged_("'{}' has no dtype", name);
    return *dtype;
  }

  StoredBox stored(const std::string& name, const TensorSlice& box, at::ScalarType dtype) {
    const auto [file, archive] = item({name, box.offsets}, torch_globals);
    const auto tensor = archive.tensor(archive.content(), name);
    if (!tensor || tensor->dtype != dtype || tensor->shape != box.sizes) {
      damaged_(
          "'{}' should have {} of [{}] in {}, but there is {}", name, c10::toString(dtype), joined(box.sizes),
          catalog_.files[file].string(),
          tensor ? fmt::format("{} of [{}]", c10::toString(tensor->dtype), joined(tensor->shape)) : std::string(archive.content().kind()));
    }
    tensor->add_checksum(catalog_, file, name);
    return tensor->stored_in(file, box);
  }

  const fs::path folder_, path_;
  const Damage damaged_{path_.string() + " is damaged: "};
  Catalog catalog_;
  std::map<Key, Place> places_;
  std::set<std::string> seen_;
  std::string checksums_;  // from the attribute dcp::kNote; empty if there is none
  std::map<std::string, size_t> numbers_;
  std::vector<InputFile> files_;
};

}  // namespace

Catalog read_dcp(const fs::path& folder) {
  return DcpReader(folder).read();
}

}  // namespace tessera::checkpoint
