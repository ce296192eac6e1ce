#include "tessera/checkpoint/verify.h"

#include <fmt/format.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

void verify_tensors(const SafetensorsFile& file, Verified& result) {
  result.files++;
  for (const auto& name : file.names()) {
    result.tensors++;
    result.bytes += file.info(name).bytes();
    if (!file.has_checksum(name)) result.without_checksum++;
    try {
      file.verify(name);
    } catch (const IoError& error) {
      result.faults.emplace_back(error.what());
    }
  }
}

}  // namespace

Verified verify(const fs::path& folder_or_file) {
  Verified result;
  std::error_code unknown;
  if (fs::is_regular_file(folder_or_file, unknown)) {
    verify_tensors(SafetensorsFile(folder_or_file), result);
    return result;
  }
  const int ranks = saved_ranks(folder_or_file);
  std::optional<RankFile> first;
  for (int rank = 0; rank < ranks; rank++) {
    try {
      auto file = open_rank_file(folder_or_file, rank, ranks);
      if (first) expect_same_save(*first, file);
      verify_tensors(file.tensors, result);
      if (!first) first = std::move(file);
    } catch (const IoError& error) {
      result.faults.emplace_back(error.what());
    }
  }
  return result;
}

}  // namespace tessera::checkpoint
