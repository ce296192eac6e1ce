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
#include "tessera/base/storage.h"
#include "tessera/checkpoint/formats/json_fault.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr auto kSingle = kHubSafetensors.single, kHubIndex = kHubSafetensors.index;

/// Whether a name is one of `names`; a numbered name may have any numbers.
bool is_of(const HubNames& names, const std::string& name) {
  return name == names.single || name == names.index || std::regex_match(name, std::regex(names.numbered));
}

/// Returns names such as "model-00001-of-00003.safetensors", or "model-2-00001-of-00003.safetensors" in generation 2. A single file is
/// called model.safetensors.
std::vector<std::string> file_names(size_t count, int generation) {
  if (count == 1) return {kSingle};
  std::vector<std::string> names;
  for (size_t i = 1; i <= count; i++)
    names.push_back(fmt::format("model-{}{:05}-of-{:05}.safetensors", generation > 1 ? fmt::format("{}-", generation) : "", i, count));
  return names;
}

/// Returns the names of the files of an earlier model, and of unfinished files that a killed save has left.
std::vector<std::string> files_before(const fs::path& folder) {
  std::vector<std::string> found;
  constexpr std::string_view kPart = ".part";
  const std::regex numbered(kHubSafetensors.numbered);
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    const auto whole = name.ends_with(kPart) ? name.substr(0, name.size() - kPart.size()) : std::string();
    const bool is_part = whole == kHubIndex || std::regex_match(whole, numbered);
    if (is_part || is_of(kHubSafetensors, name)) found.push_back(name);
  }
  return found;
}

Catalog read_weights(const fs::path& file) {
  if (file.extension() == ".bin") return read_torch_file(file);
  Catalog catalog;
  add_safetensors(catalog, SafetensorsFile(file));
  return catalog;
}

struct HubIndex {
  std::map<std::string, std::string> files = {};  // from the name of each tensor to the name of its file
  std::optional<uint64_t> save = {};
};

HubIndex read_index(const fs::path& path) {
  const auto text = InputFile(path).read_all();
  try {
    const auto json = nlohmann::json::parse(text);
    HubIndex index{.files = json.at("weight_map")};
    for (const auto& [name, shard] : index.files) {
      if (fs::path(shard).has_parent_path()) throw IoError("'{}' is in '{}', which is not in this folder", name, shard);
    }
    const auto metadata = json.value("metadata", nlohmann::json::object());
    if (metadata.is_object() && metadata.contains(kSaveKey)) index.save = save_number(metadata[kSaveKey].get<std::string>(), path.string());
    return index;
  } catch (const nlohmann::json::exception& error) {
    throw IoError("the index {} can't be used: {}", path, fault_of(error));
  } catch (const std::exception& error) {
    throw IoError("the index {} can't be used: {}", path, error.what());
  }
}

}  // namespace

bool is_hub_folder(const fs::path& folder, const HubNames& names) {
  return is_there(folder / names.index) || is_there(folder / names.single);
}

bool is_hub_folder(const fs::path& folder) {
  return is_hub_folder(folder, kHubSafetensors) || is_hub_folder(folder, kHubTorch);
}

fs::path adapter_weights(const fs::path& folder) {
  for (const auto* name : {kAdapterWeights, kAdapterTorch}) {
    if (is_there(folder / name)) return folder / name;
  }
  throw UsageError("{} has neither {} nor {}", folder, kAdapterWeights, kAdapterTorch);
}

void expect_free_for_model(const fs::path& folder) {
  if (is_there(folder / kManifestFile))
    throw UsageError("{} is a checkpoint of Tessera, and a model in it would be deleted with it; write to another folder", folder);
  if (!is_there(folder / kAdapterConfig)) return;
  throw UsageError("{} has an adapter ({}), which programs would apply to a model in the same folder; write to another folder", folder,
                   kAdapterConfig);
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
      throw IoError("{} has '{}', which the index says is {}; the files are of different models", folder / shard, name,
                    listed == index.end() ? "nowhere" : "in " + listed->second);
    }
    append(catalog, std::move(part));
  }
  for (const auto& [name, shard] : index) {
    if (catalog.tensors.contains(name) || catalog.aliases.contains(name)) continue;
    throw IoError("{} has no '{}', which the index says is there; the files are of different models", folder / shard, name);
  }
  return catalog;
}

HubWriter::HubWriter(fs::path folder, const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata,
                     int64_t max_shard_size)
    : folder_(std::move(folder)), metadata_(metadata) {
  if (max_shard_size < 1) throw UsageError("files of at most {} bytes can't hold a model", max_shard_size);
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
  if (shards_.size() == 1) metadata_.erase(kSaveKey);  // a single file needs no save number; without one, equal weights make equal files
  if (!object_path(folder_)) lock_.emplace(lock_place(folder_ / kSingle));
  before_ = files_before(folder_);
  const auto is_taken = [&](const std::string& name) { return std::ranges::find(before_, name) != before_.end(); };
  auto names = file_names(shards_.size(), 1);
  for (int next = 2; shards_.size() > 1 && std::ranges::any_of(names, is_taken); next++) names = file_names(shards_.size(), next);
  for (const auto& name : names) files_.push_back(folder_ / name);
}

HubWriter::~HubWriter() {
  if (is_complete_ || shards_.size() == 1 || is_indexed()) return;  // a single file is complete as soon as it has its name
  for (size_t i = 0; i < closed_; i++) {
    try {
      remove_tree(files_[i]);
    } catch (const std::exception&) {  // the file does no harm, because no index names it
    }
  }
}

bool HubWriter::is_indexed() const {
  try {
    if (!is_there(folder_ / kHubIndex)) return false;
    const auto index = read_index(folder_ / kHubIndex);
    return std::ranges::any_of(index.files, [&](const auto& entry) { return folder_ / entry.second == files_.front(); });
  } catch (const std::exception&) {
    return true;  // unknown, so the files stay
  }
}

SafetensorsWriter& HubWriter::begin_file() {
  const auto number = writers_.size();
  written_ = 0;
  return writers_.emplace_back(files_.at(number), shards_[number], metadata_);
}

void HubWriter::close_file(std::span<const std::string> checksums) {
  writers_[closed_].close(checksums);
  closed_++;
}

std::vector<ReservedBytes> HubWriter::reserve() {
  std::vector<ReservedBytes> reserved;
  while (writers_.size() < shards_.size()) {
    auto& writer = begin_file();
    std::ranges::move(writer.reserve(), std::back_inserter(reserved));
    writer.set_aside();
  }
  return reserved;
}

SafetensorsWriter& HubWriter::next_file() {
  if (writers_.empty()) begin_file();
  if (written_ == shards_[writers_.size() - 1].size()) {
    close_file();
    begin_file();
  }
  return writers_.back();
}

void HubWriter::write(const at::Tensor& tensor) {
  next_file().write(tensor);
  written_++;
}

void HubWriter::append(const at::Tensor& values) {
  if (next_file().append(values)) written_++;
}

void HubWriter::close(std::span<const std::string> checksums) {
  while (closed_ < shards_.size()) {
    if (writers_.size() == closed_) begin_file();
    const auto count = std::min(shards_[closed_].size(), checksums.size());
    close_file(checksums.first(count));
    checksums = checksums.subspan(count);
  }
  if (shards_.size() > 1) write_index();
  is_complete_ = true;
  try {
    remove_others();
  } catch (const IoError& error) {
    throw IoError("{} is written, but files of the earlier model could not be removed: {}", folder_, error.what());
  }
  if (shards_.size() > 1) give_usual_names();
}

void HubWriter::remove_others() const {
  // Programs that look for the single file first see the new model already; programs that look for the index first see it once the old
  // index is removed.
  if (shards_.size() == 1) remove_tree(folder_ / kHubIndex);
  for (const auto& name : before_) {
    if (name != kHubIndex && std::ranges::find(files_, folder_ / name) == files_.end()) remove_tree(folder_ / name);
  }
}

void HubWriter::give_usual_names() {
  const auto names = file_names(files_.size(), 1);
  if (files_.front() == folder_ / names.front() || object_path(folder_)) return;
  const auto unusual = files_;
  std::vector<fs::path> usual;
  std::error_code none;
  for (const auto& name : names) {
    fs::create_hard_link(unusual[usual.size()], folder_ / name, none);
    if (none) break;
    usual.push_back(folder_ / name);
  }
  const auto remove_all = [](const std::vector<fs::path>& files) {
    std::error_code stays;  // ignored: the next save removes such a file
    for (const auto& file : files) fs::remove(file, stays);
  };
  if (none) return remove_all(usual);  // a link failed, as on file systems without hard links: the files keep the names that they have
  files_ = usual;
  try {
    write_index();
  } catch (const IoError&) {
    files_ = unusual;  // the files stay under both names, because the new index may be in place although the call failed
    return;
  }
  remove_all(unusual);
}

void HubWriter::write_index() const {
  using Json = nlohmann::ordered_json;
  Json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", Json::object()}};
  auto& files = index["weight_map"].get_ref<Json::object_t&>();
  int64_t bytes = 0;
  for (size_t i = 0; i < shards_.size(); i++) {
    for (const auto& entry : shards_[i]) {
      bytes += entry.bytes();
      files.emplace_back(entry.name, files_[i].filename().string());  // for each name, operator[] would search all earlier names
    }
  }
  index["metadata"]["total_size"] = bytes;
  if (const auto save = metadata_.find(kSaveKey); save != metadata_.end()) index["metadata"][kSaveKey] = save->second;
  write_text(folder_ / kHubIndex, index.dump(2) + "\n");
}

}  // namespace tessera::checkpoint
