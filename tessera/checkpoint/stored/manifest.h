// Manifest: what the files of all ranks of a checkpoint hold together.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {

struct Manifest {
  int ranks = 1;
  uint64_t save = 0;  // a random number that tells checkpoints apart
  /// The files of all ranks, in the order of the ranks. The tensors are those of the model and of the optimizer's state, whose names are
  /// optimizer.PARAMETER.KEY. Each rank has its own values of buffers and generators, in its own file.
  Catalog catalog = {};
  std::string optimizer = {};                                  // class of the optimizer; empty if there is none
  std::string generator = {};                                  // name of the tensor with CPU generator states; empty if there is none
  std::string device_generator = {};                           // the same for generators of the ranks' devices
  std::set<std::string> not_state = {};                        // tensors of the model whose names begin with kOptimizerPrefix
  std::set<std::string> beside = {};                           // extra tensors outside the model, called .tensors.NAME
  std::vector<std::map<std::string, std::string>> notes = {};  // the notes of each rank
  std::map<std::string, std::string> origin = {};              // RankRecord::origin of rank 0
  BaseRecord base = {};
  std::string adapters = {};  // RankRecord::adapters
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Manifest, ranks, save, optimizer, generator, device_generator, not_state, beside, notes, origin, base,
                                   adapters)  // and the catalog, which write_manifest() adds

inline constexpr auto kManifestFile = "manifest.json";

/// Reads the manifest of a checkpoint, or, if it has none, makes one from the headers of its files. Throws IoError if the folder is not a
/// checkpoint, or is an incomplete checkpoint.
Manifest read_manifest(const std::filesystem::path& folder);
/// Makes a manifest from the headers of all ranks' files, which `open` opens one by one. Throws IoError unless the files are of one save.
Manifest manifest_of(int ranks, c10::function_ref<RankFile(int rank)> open);
/// The same for the files of `ranks` ranks in a folder. Throws IoError unless all of them are there and complete.
Manifest manifest_of_files(const std::filesystem::path& folder, int ranks);
/// Writes the manifest into the folder, which makes the checkpoint complete.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);

}  // namespace tessera::checkpoint
