// RankContent: an open file that one rank has written with torch_xla's FSDP.
#pragma once

#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint/formats/damage.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"
#include "tessera/checkpoint/formats/torch/archive.h"
#include "tessera/checkpoint/formats/torch_xla/names.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"

namespace tessera::checkpoint::torch_xla {

/// Whether a tensor of this name in a model's state dict is divided over the ranks.
bool is_of_shard(const std::string& name);

class RankContent {
 public:
  explicit RankContent(const std::filesystem::path& path);

  Damage fail;  // throws an error about the file
  const std::filesystem::path& path() const { return path_; }
  int64_t rank() const { return rank_; }
  int64_t ranks() const { return ranks_; }
  const TorchArchive& archive() const { return archive_; }
  const std::vector<std::string>& names() const { return names_; }  // in the model's state dict, in its order
  /// Whether the file holds a whole model instead of a rank's part, like the consolidated file that may be in the same folder.
  bool is_whole() const { return ranks_ == 0; }

  const pickle::Value& content() const { return archive_.content(); }  // a dict
  const pickle::Value& metadata() const { return dict(content(), kMetadata); }
  /// Returns the dict under a key of `outer`. Throws IoError if there is none.
  const pickle::Value& dict(const pickle::Value& outer, std::string_view key) const;
  /// The value of this name in the model's state dict, or nullptr.
  const pickle::Value* value(const std::string& name) const;
  ArchivedTensor tensor(const std::string& name) const;

 private:
  bool has_whole_model() const;
  int64_t integer(std::string_view key) const;

  std::filesystem::path path_;
  TorchArchive archive_;
  int64_t rank_ = 0, ranks_ = 0;
  std::vector<std::string> names_;
  std::unordered_map<std::string, const pickle::Value*> tensors_;
};

/// Opens the files of all ranks, in the order of the ranks. Throws IoError if the file of a rank is missing.
std::vector<RankContent> open_all(const std::filesystem::path& path);

/// Reads from shard_info and flatten_info how the parameters are divided.
std::vector<TorchXlaShard> layout_of(const RankContent& file);

}  // namespace tessera::checkpoint::torch_xla
