// Folders of weights as the Hugging Face Hub has them: one file of safetensors or torch.save, or several files with an index that says
// which file each tensor is in.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/file_lock.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// The names of the files of one kind.
struct HubNames {
  const char *single, *index, *numbered;  // `numbered` is a pattern
};
inline constexpr HubNames kHubSafetensors = {
    .single = "model.safetensors", .index = "model.safetensors.index.json", .numbered = R"(model-(\d+-)?\d{5}-of-\d{5}\.safetensors)"};
inline constexpr HubNames kHubTorch = {
    .single = "pytorch_model.bin", .index = "pytorch_model.bin.index.json", .numbered = R"(pytorch_model-\d{5}-of-\d{5}\.bin)"};

/// Whether the folder has a model in files of this kind; without `names`, of either kind.
bool is_hub_folder(const std::filesystem::path& folder, const HubNames& names);
bool is_hub_folder(const std::filesystem::path& folder);
/// The files of an adapter, as peft saves them. Programs that load a folder with such files also apply the adapter to a model in it.
inline constexpr auto kAdapterConfig = "adapter_config.json", kAdapterWeights = "adapter_model.safetensors",
                      kAdapterTorch = "adapter_model.bin";
/// Returns the file with the weights of the adapter in a folder. Throws UsageError if there is none.
std::filesystem::path adapter_weights(const std::filesystem::path& folder);
/// Throws UsageError if the folder has an adapter or is a checkpoint of Tessera, since a model must not be written there.
void expect_free_for_model(const std::filesystem::path& folder);
/// Whether the name is one that kHubSafetensors or kHubTorch gives to files.
bool is_hub_file(const std::string& name);

/// Reads the model in a folder, from safetensors if files of both kinds are there. Throws IoError unless the files have exactly the tensors
/// that the index lists.
Catalog read_hub_folder(const std::filesystem::path& folder);

/// Writes tensors to files of at most `max_shard_size` bytes; a larger tensor has a file of its own. A single file is called
/// model.safetensors and has no index and no kSaveKey. Several files and their index have kSaveKey if `metadata` has it. At any moment the
/// folder has the old model or the new one: several files first get names that are not in use, and writing the index makes them the model.
/// Then close() removes the files of the old model and gives the new files the usual names. Only one job at a time can write into a folder.
class HubWriter {
 public:
  HubWriter(std::filesystem::path folder, const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata,
            int64_t max_shard_size);
  HubWriter(const HubWriter&) = delete;
  /// Removes the new files if the model was not completed.
  ~HubWriter();

  /// Writes the next tensor, in the order of the entries. One file is open at a time.
  void write(const at::Tensor& tensor);
  /// Writes the next values, in row-major order, of a tensor that comes in pieces.
  void append(const at::Tensor& values);
  /// Instead of write() and append(): reserves bytes for each tensor, which other processes fill.
  std::vector<ReservedBytes> reserve();
  /// Completes the model. After reserve(), takes the checksums of all tensors, in the order of the entries.
  void close(std::span<const std::string> checksums = {});
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  SafetensorsWriter& begin_file();
  /// The file of the next tensor.
  SafetensorsWriter& next_file();
  void close_file(std::span<const std::string> checksums = {});
  void write_index() const;
  /// Whether the index in the folder names the new files.
  bool is_indexed() const;
  void remove_others() const;
  void give_usual_names();

  const std::filesystem::path folder_;
  std::map<std::string, std::string> metadata_;
  std::optional<NamedLock> lock_;    // none in an object store
  std::vector<std::string> before_;  // names of the files of an earlier model
  std::vector<std::vector<SafetensorsEntry>> shards_;
  std::vector<std::filesystem::path> files_;
  std::deque<SafetensorsWriter> writers_;
  size_t written_ = 0;  // number of tensors written to the last file
  size_t closed_ = 0;   // number of closed files
  bool is_complete_ = false;
};

}  // namespace tessera::checkpoint
