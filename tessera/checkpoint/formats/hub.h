// Folders of weights as the Hugging Face Hub has them: one file of safetensors or torch.save, or several with an index that says which
// tensor is in which.
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

/// Whether the folder has such files.
bool is_hub_folder(const std::filesystem::path& folder, const HubNames& names);
bool is_hub_folder(const std::filesystem::path& folder);
/// The files of a folder of peft. Programs that load such a folder also put the adapter over a model that is in it.
inline constexpr auto kAdapterConfig = "adapter_config.json", kAdapterWeights = "adapter_model.safetensors",
                      kAdapterTorch = "adapter_model.bin";
/// The file with the weights of an adapter. Throws UsageError if there is none.
std::filesystem::path adapter_weights(const std::filesystem::path& folder);
/// Throws UsageError for a folder with an adapter, or a checkpoint of Tessera.
void expect_free_for_model(const std::filesystem::path& folder);
/// Whether a file has a name of either kind.
bool is_hub_file(const std::string& name);

/// Reads safetensors where both kinds are there. Throws IoError unless the files have exactly the tensors that the index lists.
Catalog read_hub_folder(const std::filesystem::path& folder);

/// Writes the tensors to files of at most `max_shard_size` bytes; a larger tensor has a file of its own. A single file is
/// model.safetensors, without an index; several files and their index have the metadata kSaveKey, if it is given. At any moment the folder
/// has the old model or the new one: several files get names that no other file has, and the index makes them the model. Then files of an
/// earlier model are removed, and the new ones get the usual names. One job writes into a folder at a time.
class HubWriter {
 public:
  HubWriter(std::filesystem::path folder, const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata,
            int64_t max_shard_size);
  HubWriter(const HubWriter&) = delete;
  /// Removes the files of a model that is not complete.
  ~HubWriter();

  /// Writes the next tensor, in the order of the entries. One file is open at a time.
  void write(const at::Tensor& tensor);
  /// Instead of write(): reserves bytes for each tensor, which other processes fill.
  std::vector<ReservedBytes> reserve();
  /// Files that others have filled are closed with the checksum of each tensor.
  void close(std::span<const std::string> checksums = {});
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  SafetensorsWriter& begin_file();
  void close_file(std::span<const std::string> checksums = {});
  void write_index() const;
  /// Whether the index in the folder names the new files.
  bool is_indexed() const;
  void remove_others() const;
  void give_usual_names();

  const std::filesystem::path folder_;
  std::map<std::string, std::string> metadata_;
  std::optional<NamedLock> lock_;    // none in a Storage
  std::vector<std::string> before_;  // files of an earlier model
  std::vector<std::vector<SafetensorsEntry>> shards_;
  std::vector<std::filesystem::path> files_;
  std::deque<SafetensorsWriter> writers_;
  size_t written_ = 0;  // tensors in the last file
  size_t closed_ = 0;   // number of closed files
  bool is_complete_ = false;
};

}  // namespace tessera::checkpoint
