#include "tessera/checkpoint/formats/hub.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/checkpoint/formats/json_fault.h"
#include "tessera/checkpoint/formats/torch_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr auto kSingle = kHubSafetensors.single, kHubIndex = kHubSafetensors.index;

/// model-00001-of-00003.safetensors, whatever the numbers, and not other files that begin and end so.
bool is_of(const HubNames& names, const std::string& name) {
  return name == names.single || name == names.index || std::regex_match(name, std::regex(names.numbered));
}

Catalog read_weights(const fs::path& file) {
  if (file.extension() == ".bin") return read_torch_file(file);
  Catalog catalog;
  add_safetensors(catalog, SafetensorsFile(file));
  return catalog;
}

struct HubIndex {
  std::map<std::string, std::string> files = {};  // from each tensor to the name of its file
  std::optional<uint64_t> save = {};
};

HubIndex read_index(const fs::path& path) {
  const auto text = InputFile(path).read_all();
  try {
    const auto json = nlohmann::json::parse(text);
    HubIndex index{.files = json.at("weight_map")};
    for (const auto& [name, shard] : index.files) {
      if (fs::path(shard).has_parent_path()) throw IoError(fmt::format("'{}' is in '{}', which is not in this folder", name, shard));
    }
    const auto metadata = json.value("metadata", nlohmann::json::object());
    if (metadata.is_object() && metadata.contains(kSaveKey)) index.save = save_number(metadata[kSaveKey].get<std::string>(), path.string());
    return index;
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format("the index {} can't be used: {}", path.string(), fault_of(error)));
  } catch (const std::exception& error) {
    throw IoError(fmt::format("the index {} can't be used: {}", path.string(), error.what()));
  }
}

}  // namespace

bool is_hub_folder(const fs::path& folder, const HubNames& names) {
  return is_there(folder / names.index) || is_there(folder / names.single);
}

bool is_hub_folder(const fs::path& folder) {
  return is_hub_folder(folder, kHubSafetensors) || is_hub_folder(folder, kHubTorch);
}

void expect_no_adapter(const fs::path& folder) {
  if (!is_there(folder / kAdapterConfig)) return;
  throw UsageError(fmt::format("{} has an adapter ({}), which programs would put over a model that is there, too; write to another folder",
                               folder.string(), kAdapterConfig));
}

bool is_hub_file(const std::string& name) {
  return is_of(kHubSafetensors, name) || is_of(kHubTorch, name);
}

Catalog read_hub_folder(const fs::path& folder) {
  const auto& names = is_hub_folder(folder, kHubSafetensors) ? kHubSafetensors : kHubTorch;
  if (!is_there(folder / names.index)) return read_weights(folder / names.single);
  const auto [index, save] = read_index(folder / names.index);
  std::set<std::string> shards;
  for (const auto& [name, shard] : index) shards.insert(shard);
  Catalog catalog;
  note_save(catalog, save, folder / names.index);
  for (const auto& shard : shards) {
    auto part = read_weights(folder / shard);
    for (const auto& [name, tensor] : part.tensors) {
      const auto listed = index.find(name);
      if (listed != index.end() && listed->second == shard) continue;
      throw IoError(fmt::format("{} has '{}', which the index says is {}; the files are of different models", (folder / shard).string(),
                                name, listed == index.end() ? "nowhere" : "in " + listed->second));
    }
    append(catalog, std::move(part));
  }
  for (const auto& [name, shard] : index) {
    if (catalog.tensors.contains(name) || catalog.aliases.contains(name)) continue;
    throw IoError(
        fmt::format("{} has no '{}', which the index says is there; the files are of different models", (folder / shard).string(), name));
  }
  return catalog;
}

HubWriter::HubWriter(fs::path folder, const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata,
                     int64_t max_shard_size)
    : folder_(std::move(folder)) {
  if (max_shard_size < 1) throw UsageError(fmt::format("files of at most {} bytes can't hold a model", max_shard_size));
  int64_t bytes = 0;
  for (const auto& entry : entries) {
    if (shards_.empty() || bytes + entry.bytes() > max_shard_size) {
      shards_.emplace_back();
      bytes = 0;
    }
    shards_.back().push_back(entry);
    bytes += entry.bytes();
  }
  if (shards_.empty()) shards_.emplace_back();
  make_folder(folder_);
  auto shared = metadata;
  if (shards_.size() == 1) shared.erase(kSaveKey);  // one file is mixed with none, and equal weights make equal files
  if (const auto save = shared.find(kSaveKey); save != shared.end()) save_ = save->second;
  for (size_t i = 0; i < shards_.size(); i++) {
    files_.push_back(folder_ / (shards_.size() == 1 ? kSingle : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size())));
    writers_.emplace_back(files_[i], shards_[i], shared);
  }
}

std::vector<Room> HubWriter::leave_rooms() {
  std::vector<Room> rooms;
  for (auto& writer : writers_) std::ranges::move(writer.leave_rooms(), std::back_inserter(rooms));
  return rooms;
}

void HubWriter::write(const at::Tensor& tensor) {
  auto place = next_++;
  size_t file = 0;
  while (place >= shards_[file].size()) place -= shards_[file++].size();
  writers_[file].write(tensor);
}

void HubWriter::close() {
  remove_index();
  for (auto& writer : writers_) writer.close();
  finish();
}

void HubWriter::close(std::span<const std::string> checksums) {
  remove_index();
  for (size_t i = 0; i < shards_.size(); i++) {
    writers_[i].close(checksums.first(shards_[i].size()));
    checksums = checksums.subspan(shards_[i].size());
  }
  finish();
}

void HubWriter::remove_index() const {
  // While the files of another model are replaced one by one, nobody should take them for one model.
  std::error_code error;
  fs::remove(folder_ / kHubIndex, error);
  if (error) throw IoError(fmt::format("can't remove {}: {}", (folder_ / kHubIndex).string(), error.message()));
}

void HubWriter::finish() const {
  if (shards_.size() > 1) write_index();
  // What is left of another model would be loaded along with this one.
  for (const auto& name : names_in(folder_).value_or(std::vector<std::string>())) {
    const bool is_ours = std::ranges::find(files_, folder_ / name) != files_.end() || (name == kHubIndex && shards_.size() > 1);
    if (!is_of(kHubSafetensors, name) || is_ours) continue;
    std::error_code error;
    fs::remove(folder_ / name, error);
    if (error) throw IoError(fmt::format("all is written, but can't remove {}: {}", (folder_ / name).string(), error.message()));
  }
}

void HubWriter::write_index() const {
  nlohmann::ordered_json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", nlohmann::ordered_json::object()}};
  int64_t bytes = 0;
  for (size_t i = 0; i < shards_.size(); i++) {
    for (const auto& entry : shards_[i]) {
      bytes += entry.bytes();
      index["weight_map"][entry.name] = files_[i].filename().string();
    }
  }
  index["metadata"]["total_size"] = bytes;
  if (!save_.empty()) index["metadata"][kSaveKey] = save_;
  write_text(folder_ / kHubIndex, index.dump(2) + "\n");
}

}  // namespace tessera::checkpoint
