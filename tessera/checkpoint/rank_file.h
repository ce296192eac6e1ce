// One rank's file in a checkpoint: how it is called, and what its header says beyond the tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/tensor_slice.h"
#include "tessera/checkpoint/formats/safetensors.h"

namespace tessera::checkpoint {

/// The name of a tensor that an optimizer keeps begins with this; that of the parameter and the optimizer's own for it follow.
inline constexpr auto kOptimizerPrefix = "optimizer.";
inline constexpr auto kGeneratorName = "generator.cpu";

/// Where a rank's part of a tensor belongs: it has the values of the slices one after the other, each in the memory order of the strides.
struct PartRecord {
  std::vector<int64_t> shape, strides;  // of the whole one
  std::vector<TensorSlice> slices;

  int64_t numel() const;
};

struct RankRecord {
  int rank = 0, ranks = 1;
  uint64_t save = 0;                             // drawn anew each time: files of two saves do not go together
  std::map<std::string, PartRecord> parts = {};  // of sharded parameters
  /// Of the optimizer's state. What it keeps for blocks of values is of the flat parameter, with one value for each block of the slice.
  std::map<std::string, PartRecord> state = {};
  std::vector<std::string> whole = {};    // parameters in no unit; only rank 0 writes them
  std::vector<std::string> buffers = {};  // each rank's own
  std::map<std::string, std::string> aliases = {};
  std::string optimizer = {};  // its class; empty without one
  std::map<std::string, std::string> notes = {};
};

/// The header's metadata that tells all this.
std::map<std::string, std::string> to_metadata(const RankRecord& record);

struct RankFile {
  SafetensorsFile tensors;
  RankRecord record;
};

std::filesystem::path rank_file(const std::filesystem::path& folder, int rank, int ranks);
/// Throws IoError if there is none, or a damaged one, or another rank's.
RankFile open_rank_file(const std::filesystem::path& folder, int rank, int ranks);

/// Throws IoError if the files come from different saves.
void expect_same_save(const RankFile& one, const RankFile& other);

/// By how many ranks a checkpoint was saved. Throws IoError if the folder is none, or files are missing.
int saved_ranks(const std::filesystem::path& folder);

/// "'a', 'b' and 7 more"
std::string some_of(const std::vector<std::string>& names);

}  // namespace tessera::checkpoint
