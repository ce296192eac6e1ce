// The files of torch_xla's FSDP, one for each rank: {"model": ..., "shard_metadata": ..., "optimizer": ...}, in which every parameter is
// divided evenly over the ranks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/atomic_write.h"

namespace tessera::checkpoint {

struct Catalog;
class CatalogReader;

/// The rank files that a path stands for: the prefix P of files P_rank-R-of-N.pth, one of these files, or a pattern with * in it. Empty if
/// there are none.
std::vector<std::filesystem::path> torch_xla_files(const std::filesystem::path& path);

/// Whether a file of torch.save is a rank file. Throws IoError if it is damaged.
bool is_torch_xla_file(const std::filesystem::path& path);

enum class TorchXlaContent { All, Model };

/// The model of all ranks under its own names, the optimizer's state as optimizer.PARAMETER.KEY, and other values of rank 0. Throws IoError
/// unless the files are those of all ranks of one model.
Catalog read_torch_xla(const std::filesystem::path& path, TorchXlaContent content = TorchXlaContent::All);

/// A tensor that is divided over the ranks: a parameter, or several that lie one after the other in a flat one.
struct TorchXlaShard {
  struct Part {
    std::string name, original_name;  // in the model, and in the module that is wrapped
    std::vector<int64_t> shape = {};
  };
  std::string module, original_name;  // of the wrapper, and of the tensor in it
  std::vector<int64_t> shape = {};
  std::vector<Part> parts = {};
  bool on_dim_0 = false;        // rows are divided, instead of values
  int64_t size_multiple = 128;  // of the values that a rank has

  bool is_flat() const { return !parts.empty() && parts.front().original_name != original_name; }
  /// In shard_info, and in the state of the model.
  std::string name() const, state_name() const;
};

/// How the model in these files is divided, in the order of its parameters.
std::vector<TorchXlaShard> read_torch_xla_layout(const std::filesystem::path& path);

struct TorchXlaOptions {
  std::vector<std::string> units = {""};  // the modules that are wrapped; "" is the model itself
  /// The parameters that are divided, in the order in which the model lists them; all in alphabetical order unless given. The order matters
  /// to a program that loads flat parameters.
  std::vector<std::string> parameters = {};
  std::set<std::string> frozen = {};  // those of them that are not trained, which have flat parameters of their own
  bool flatten_parameters = false;    // the parameters of a unit become one
  bool shard_param_on_dim_0 = false;  // unless they are flat
  int64_t shard_size_multiple = 128;  // of the values that a rank has, unless they are rows
};

/// How torch_xla divides a model whose modules are wrapped in this way.
std::vector<TorchXlaShard> torch_xla_layout(const Catalog& model, const TorchXlaOptions& options = {});

/// PREFIX_rank-R-of-N.pth, with eight digits each.
std::filesystem::path torch_xla_file(const std::filesystem::path& prefix, int rank, int ranks);

/// Writes the file of one rank. It appears under its name only when commit() is called. Memory is needed for the rank's part of one tensor.
class TorchXlaRankFile {
 public:
  /// `stored` has the tensors of the layout under their names. What the layout does not divide is in every file, as buffers are. The state
  /// of an optimizer is written if its settings are there, too, as read_torch_xla gives them.
  TorchXlaRankFile(const std::filesystem::path& prefix, int rank, int ranks, const CatalogReader& stored,
                   const std::vector<TorchXlaShard>& layout);
  void commit() { file_.commit(); }

 private:
  NewFile file_;
};

/// Throws UsageError if there are files of this prefix and of another number of ranks, with which new ones would be mixed up.
void expect_no_other_ranks(const std::filesystem::path& prefix, int ranks);

/// Writes the files of all ranks, or none. Returns their names.
std::vector<std::filesystem::path> write_torch_xla(const std::filesystem::path& prefix, int ranks, const CatalogReader& stored,
                                                   const std::vector<TorchXlaShard>& layout);

}  // namespace tessera::checkpoint
