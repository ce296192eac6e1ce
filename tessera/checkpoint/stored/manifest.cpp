#include "tessera/checkpoint/stored/manifest.h"

#include <ATen/ATen.h>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/dtype_names.h"
#include "tessera/checkpoint/formats/json_fault.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr auto kManifestFormat = "tessera";
constexpr int kManifestVersion = 2;
constexpr auto kChecksum = "xxh3_64";                                      // key of the checksum of all other keys, as JSON without spaces
constexpr int64_t kMostValues = std::numeric_limits<int64_t>::max() / 16;  // so that the number of their bytes fits into 64 bits

/// Makes one manifest of the headers of the files, in the order of the ranks.
class Composition {
 public:
  explicit Composition(const RankFile& first) {
    const auto& record = first.record;
    manifest_ = {.ranks = record.ranks,
                 .save = record.save,
                 .optimizer = record.optimizer,
                 .generator = record.generator,
                 .device_generator = record.device_generator,
                 .origin = record.origin,
                 .base = record.base,
                 .adapters = record.adapters};
    manifest_.catalog.save = {.number = record.save, .file = first.tensors.path()};
  }

  void add(const RankFile& file) {
    file_ = &file;
    if (file.record.optimizer != manifest_.optimizer) {
      throw UsageError("rank {} has saved {}, and rank 0 {}; give all ranks an optimizer of the same class, or none", file.record.rank,
                       named(file.record.optimizer), named(manifest_.optimizer));
    }
    number_ = manifest_.catalog.files.size();
    manifest_.catalog.files.push_back(file.tensors.path());
    manifest_.notes.push_back(file.record.notes);
    manifest_.base.parameters.insert(file.record.base.parameters.begin(), file.record.base.parameters.end());
    manifest_.catalog.buffers.insert(file.record.buffers.begin(), file.record.buffers.end());
    manifest_.catalog.aliases.insert(file.record.aliases.begin(), file.record.aliases.end());
    for (const auto& [name, part] : file.record.parts) {
      add_slices(name, part);
      note_model(name);
    }
    for (const auto* names : {&file.record.whole, &file.record.buffers}) {
      for (const auto& name : *names) {
        add_whole(name);
        note_model(name);
      }
    }
    for (const auto& name : file.record.beside) add_whole(name);
    for (const auto& name : file.record.by_rank) add_rows(name);
    for (const auto* names : {&file.record.beside, &file.record.by_rank}) manifest_.beside.insert(names->begin(), names->end());
    for (const auto& [name, part] : file.record.state) {
      const auto& sizes = file.tensors.info(name).sizes;
      if (part.numel() == 0) {
        empty_.emplace(name, StoredTensor{.dtype = file.tensors.info(name).dtype, .shape = part.shape});
      } else if (sizes.empty() || part.shape.empty()) {  // one number: for a whole parameter, or for a parameter that is a number
        add_whole(name);
      } else {
        add_slices(name, part);
      }
    }
    for (const auto* name : {&file.record.generator, &file.record.device_generator}) {
      if (!name->empty()) add_whole(*name);
    }
    manifest_.catalog.checksums.push_back({.file = number_,
                                           .begin = 0,
                                           .bytes = file.tensors.header_bytes(),
                                           .checksum = Checksum::text(file.tensors.header_checksum()),
                                           .name = kHeaderName});
    for (const auto& name : file.tensors.names()) {
      if (!file.tensors.has_checksum(name)) continue;
      manifest_.catalog.checksums.push_back({.file = number_,
                                             .begin = file.tensors.offset(name),
                                             .bytes = static_cast<uint64_t>(file.tensors.info(name).bytes()),
                                             .checksum = file.tensors.checksum(name),
                                             .name = name});
    }
  }

  Manifest finish() && {
    manifest_.catalog.tensors.merge(empty_);  // adds state of which no rank has a value
    return std::move(manifest_);
  }

 private:
  void note_model(const std::string& name) {
    if (name.starts_with(kOptimizerPrefix)) manifest_.not_state.insert(name);
  }

  static std::string named(const std::string& optimizer) { return optimizer.empty() ? "no optimizer" : "a " + optimizer; }

  StoredTensor& tensor(const std::string& name, const std::vector<int64_t>& shape) {
    const auto dtype = file_->tensors.info(name).dtype;
    const auto [found, is_new] = manifest_.catalog.tensors.try_emplace(name, StoredTensor{.dtype = dtype, .shape = shape});
    if (found->second.shape != shape || found->second.dtype != dtype) refuse_difference(name);
    return found->second;
  }

  [[noreturn]] void refuse_difference(const std::string& name) const {
    throw IoError("the ranks' files disagree about the shape or the dtype of '{}': {} and {}", name, manifest_.catalog.files.front(),
                  file_->tensors.path());
  }

  void add_slices(const std::string& name, const PartRecord& part) {
    auto& stored = tensor(name, part.shape);
    const auto views = views_of_slices(at::empty({part.numel()}, at::TensorOptions(at::kMeta)), part.slices, part.strides);
    for (size_t i = 0; i < part.slices.size(); i++) {
      const auto before = static_cast<uint64_t>(views[i].storage_offset()) * c10::elementSize(stored.dtype);
      stored.boxes.push_back(
          {.box = part.slices[i], .file = number_, .offset = file_->tensors.offset(name) + before, .strides = views[i].strides().vec()});
    }
  }

  void add_whole(const std::string& name) {
    const auto sizes = file_->tensors.info(name).sizes;
    const auto strides = c10::contiguous_strides(sizes);
    tensor(name, sizes)
        .boxes.push_back({.box = whole_slice(sizes),
                          .file = number_,
                          .offset = file_->tensors.offset(name),
                          .strides = {strides.begin(), strides.end()}});
  }

  /// Adds the rows of this rank below those of earlier ranks.
  void add_rows(const std::string& name) {
    const auto& sizes = file_->tensors.info(name).sizes;
    const auto dtype = file_->tensors.info(name).dtype;
    const auto [found, is_new] = manifest_.catalog.tensors.try_emplace(name, StoredTensor{.dtype = dtype, .shape = sizes});
    auto& stored = found->second;
    if (is_new) stored.shape.front() = 0;
    const auto begin = stored.shape.front();
    auto shape = sizes;
    shape.front() = begin;
    if (shape != stored.shape || dtype != stored.dtype) refuse_difference(name);
    stored.shape.front() += sizes.front();
    for (auto& box : stored.boxes) box.box.shape = stored.shape;
    const auto strides = c10::contiguous_strides(sizes);
    std::vector<int64_t> offsets(sizes.size());
    offsets.front() = begin;
    stored.boxes.push_back({.box = {.shape = stored.shape, .offsets = offsets, .sizes = sizes},
                            .file = number_,
                            .offset = file_->tensors.offset(name),
                            .strides = {strides.begin(), strides.end()}});
  }

  Manifest manifest_;
  std::map<std::string, StoredTensor> empty_;  // state of which some rank has no value
  const RankFile* file_ = nullptr;
  size_t number_ = 0;
};

json to_json(const StoredTensor& tensor) {
  auto boxes = json::array();
  for (const auto& [box, file, offset, first, strides] : tensor.boxes) {
    const auto begin = offset + static_cast<uint64_t>(first) * c10::elementSize(tensor.dtype);
    boxes.push_back({{"file", file}, {"offset", begin}, {"offsets", box.offsets}, {"sizes", box.sizes}, {"strides", strides}});
  }
  return {{"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}, {"boxes", boxes}};
}

StoredTensor tensor_from_json(const json& text) {
  StoredTensor tensor{.dtype = dtype_named(text.at("dtype").get<std::string>()), .shape = text.at("shape")};
  if (!checked_numel(tensor.shape) || *checked_numel(tensor.shape) > kMostValues)
    throw IoError("there is no tensor of the shape [{}]", joined(tensor.shape));
  for (const auto& box : text.at("boxes")) {
    tensor.boxes.push_back({.box = {.shape = tensor.shape, .offsets = box.at("offsets"), .sizes = box.at("sizes")},
                            .file = box.at("file"),
                            .offset = box.at("offset"),
                            .strides = box.at("strides")});
  }
  return tensor;
}

json content_of(const fs::path& folder, const Manifest& manifest) {
  const auto& catalog = manifest.catalog;
  json result = manifest;
  result.update({{"format", kManifestFormat}, {"version", kManifestVersion}, {"buffers", catalog.buffers}, {"aliases", catalog.aliases}});
  result["tensors"] = json::object();
  result["files"] = json::array();
  for (const auto& [name, tensor] : catalog.tensors) result["tensors"][name] = to_json(tensor);
  for (const auto& path : catalog.files) {
    const auto bytes = size_of_file(path);
    if (!bytes) throw IoError("{} was removed while the checkpoint was saved", path);
    result["files"].push_back({{"name", path.lexically_relative(folder).string()}, {"bytes", *bytes}, {"checksums", json::object()}});
  }
  for (const auto& bytes : catalog.checksums) {
    result["files"][bytes.file]["checksums"][bytes.name] = {{"begin", bytes.begin}, {"bytes", bytes.bytes}, {"xxh3_64", bytes.checksum}};
  }
  return result;
}

/// Throws UsageError for a manifest of another version, which is not damage.
void expect_known(const json& text) {
  if (text.at("format") != kManifestFormat) throw IoError("another program has written it");
  const int version = text.at("version");
  if (version != kManifestVersion)
    throw UsageError("the checkpoint is of version {}, this version of Tessera reads {}; load it with the version that wrote it", version,
                     kManifestVersion);
}

/// Fills `bytes_of_files` with the sizes that the files should have.
Manifest manifest_from_json(const fs::path& folder, const json& text, std::vector<uint64_t>& bytes_of_files) {
  auto manifest = text.get<Manifest>();
  auto& catalog = manifest.catalog;
  catalog.save = {.number = manifest.save, .file = folder / kManifestFile};
  catalog.aliases = text.at("aliases");
  catalog.buffers = text.at("buffers");
  for (const auto& file : text.at("files")) {
    const fs::path name = file.at("name").get<std::string>();
    if (name.has_parent_path() || name.empty()) throw IoError("it names the file '{}', which is not in its folder", name);
    const auto path = folder / name;
    for (const auto& [tensor, bytes] : file.at("checksums").items()) {
      catalog.checksums.push_back({.file = catalog.files.size(),
                                   .begin = bytes.at("begin"),
                                   .bytes = bytes.at("bytes"),
                                   .checksum = bytes.at("xxh3_64"),
                                   .name = tensor});
    }
    catalog.files.push_back(path);
    bytes_of_files.push_back(file.at("bytes"));
  }
  for (const auto& [name, tensor] : text.at("tensors").items()) catalog.tensors[name] = tensor_from_json(tensor);
  for (const auto& name : manifest.beside) {
    if (!name.starts_with(kBesidePrefix) || !catalog.tensors.contains(name)) throw IoError("there is no extra tensor '{}'", name);
  }
  for (auto* name : {&manifest.generator, &manifest.device_generator}) {
    if (!catalog.tensors.contains(*name)) name->clear();
  }
  for (const auto& [name, tensor] : catalog.tensors) {
    for (const auto& box : tensor.boxes) {
      if (box.file >= catalog.files.size()) throw IoError("'{}' lies in a file that is not listed", name);
    }
  }
  const auto ranks = static_cast<size_t>(manifest.ranks);
  if (manifest.ranks < 1 || catalog.files.size() != ranks || manifest.notes.size() != ranks)
    throw IoError("it does not list one file for each rank");
  return manifest;
}

/// Throws IoError if a file is missing, or has another size.
void expect_files(const fs::path& folder, const std::vector<fs::path>& files, const std::vector<uint64_t>& sizes) {
  for (size_t i = 0; i < files.size(); i++) {
    const auto size = size_of_file(files[i]);
    if (!size) {
      throw IoError("the checkpoint {} is incomplete: '{}' is missing", folder, files[i].lexically_relative(folder));
    }
    if (*size != sizes[i]) {
      throw IoError("{} is cut off, or of another save: it has {} bytes, not {}", files[i], *size, sizes[i]);
    }
  }
}

}  // namespace

Manifest manifest_of(int ranks, c10::function_ref<RankFile(int rank)> open) {
  const auto first = open(0);
  Composition all(first);
  all.add(first);
  for (int rank = 1; rank < ranks; rank++) {
    const auto file = open(rank);
    expect_same_save(first, file);
    all.add(file);
  }
  return std::move(all).finish();
}

Manifest manifest_of_files(const fs::path& folder, int ranks) {
  return manifest_of(ranks, [&](int rank) { return open_rank_file(folder, rank, ranks); });
}

Manifest read_manifest(const fs::path& folder) {
  const auto path = folder / kManifestFile;
  if (!is_there(path)) return manifest_of_files(folder, saved_ranks(folder));
  const auto text = InputFile(path).read_all();
  Manifest manifest;
  std::vector<uint64_t> bytes_of_files;
  try {
    auto content = json::parse(text);
    const auto checksum = content.at(kChecksum).get<std::string>();
    content.erase(kChecksum);
    expect_known(content);
    if (checksum != checksum_of(content.dump()))
      throw IoError("it is damaged: it is not what was written, because it has another checksum");
    manifest = manifest_from_json(folder, content, bytes_of_files);
  } catch (const UsageError&) {
    throw;
  } catch (const json::exception& error) {
    throw IoError("{} can't be used: {}", path, fault_of(error));
  } catch (const std::exception& error) {
    throw IoError("{} can't be used: {}", path, error.what());
  }
  expect_files(folder, manifest.catalog.files, bytes_of_files);
  return manifest;
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  auto content = json::parse(content_of(folder, manifest).dump(-1, ' ', false, json::error_handler_t::replace));
  content[kChecksum] = checksum_of(content.dump());
  write_text(folder / kManifestFile, content.dump(1) + "\n");
}

}  // namespace tessera::checkpoint
