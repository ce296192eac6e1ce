// The files of torch_xla's FSDP, one for each rank: {"model": ..., "shard_metadata": ..., "optimizer": ...}, in which every parameter is
// divided evenly over the ranks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera::checkpoint {

struct Catalog;

/// Returns the rank files that a path means: the path is the prefix P of files P_rank-R-of-N.pth, one of these files, or a pattern with *.
/// Empty if there are no such files.
std::vector<std::filesystem::path> torch_xla_files(const std::filesystem::path& path);

/// Whether a file of torch.save is a rank file. Throws IoError if it is damaged.
bool is_torch_xla_file(const std::filesystem::path& path);

enum class TorchXlaContent { All, Model };

/// Reads the model of all ranks under its own names, the optimizer's state as optimizer.PARAMETER.KEY, and other values of rank 0. Throws
/// IoError unless the files are those of all ranks of one model.
Catalog read_torch_xla(const std::filesystem::path& path, TorchXlaContent content = TorchXlaContent::All);

/// A tensor that is divided over the ranks: a parameter, or a flat parameter that holds several parameters one after the other.
struct TorchXlaShard {
  struct Part {
    std::string name, original_name;  // its name in the model, and in the wrapped module
    std::vector<int64_t> shape = {};
  };
  std::string module, original_name;  // the names of the wrapper, and of the tensor in it
  std::vector<int64_t> shape = {};
  std::vector<Part> parts = {};

  bool is_flat() const { return !parts.empty() && parts.front().original_name != original_name; }
  /// The names of the shard in shard_info, and in the model's state dict.
  std::string name() const, state_name() const;
};

}  // namespace tessera::checkpoint
