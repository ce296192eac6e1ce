// One rank's file in a checkpoint: how it is called, and what its header says beyond the tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/formats/safetensors.h"

namespace tessera::checkpoint {

/// Where a rank's part of a parameter belongs.
struct PartRecord {
  std::vector<int64_t> sizes, strides;  // of the whole one
  int64_t begin = 0, numel = 0;         // which of its values, in the order in which they lie in memory
};

struct RankRecord {
  int rank = 0, ranks = 1;
  uint64_t save = 0;  // drawn anew each time: files of two saves do not go together
  std::map<std::string, PartRecord> parts = {};
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
