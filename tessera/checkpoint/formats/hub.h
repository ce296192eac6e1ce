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

/// How the files of one kind are called.
struct HubNames {
  const char *single, *index, *numbered;  // of the numbered ones the pattern
};
inline constexpr HubNames kHubSafetensors = {
    .single = "model.safetensors", .index = "model.safetensors.index.json", .numbered = R"(model-(\d+-)?\d{5}-of-\d{5}\.safetensors)"};
inline constexpr HubNames kHubTorch = {
    .single = "pytorch_model.bin", .index = "pytorch_model.bin.index.json", .numbered = R"(pytorch_model-\d{5}-of-\d{5}\.bin)"};

/// Whether the folder has such files.
bool is_hub_folder(const std::filesystem::path& folder, const HubNames& names);
bool is_hub_folder(const std::filesystem::path& folder);
/// The files of a folder of peft. Programs that load one put the adapter over the model that is in it, too.
inline constexpr auto kAdapterConfig = "adapter_config.json", kAdapterWeights = "adapter_model.safetensors",
                      kAdapterTorch = "adapter_model.bin";
/// The file with the weights of an adapter. Throws UsageError if there is none.
std::filesystem::path adapter_weights(const std::filesystem::path& folder);
/// Throws UsageError for a folder with an adapter.
void expect_no_adapter(const std::filesystem::path& folder);
/// Whether a file has a name of either kind.
bool is_hub_file(const std::string& name);

/// Safetensors, where there are both. Throws IoError unless the files have exactly the tensors that the index lists.
Catalog read_hub_folder(const std::filesystem::path& folder);

/// Files of at most `max_shard_size` bytes for the tensors, or of one tensor that is larger. One file is model.safetensors, without an
/// index; each of several has the metadata kSaveKey, if it is given, and so has their index. At any moment the folder has the model that was
/// there or the new one: several files get names that no other has, and the index makes them the model. Then files of an earlier model are
/// removed, and the new ones get the usual names. One job writes into a folder at a time.
class HubWriter {
 public:
  HubWriter(std::filesystem::path folder, const std::vector<SafetensorsEntry>& entries, const std::map<std::string, std::string>& metadata,
            int64_t max_shard_size);
  HubWriter(const HubWriter&) = delete;
  /// Removes what is not complete.
  ~HubWriter();

  /// The next tensor, in the order of the entries. One file is open at a time.
  void write(const at::Tensor& tensor);
  void close();
  /// Instead of both: reserves bytes for each tensor, which others fill.
  std::vector<ReservedBytes> reserve();
  /// When they are filled: with the checksum of each.
  void close(std::span<const std::string> checksums);
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  SafetensorsWriter& begin_file();
  void close_file(std::span<const std::string> checksums = {});
  /// Makes the files the model of the folder.
  void finish();
  void write_index() const;
  /// Whether the index that is there has the new files.
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
  size_t written_ = 0;  // tensors of the last one
  size_t closed_ = 0;   // of the writers
  bool is_complete_ = false;
};

}  // namespace tessera::checkpoint
