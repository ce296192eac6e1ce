// One rank's file in a checkpoint: its name, and the metadata in its header.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/tensor_slice.h"
#include "tessera/checkpoint/formats/safetensors.h"

namespace tessera::checkpoint {

/// The name of a tensor of the optimizer's state is optimizer.PARAMETER.KEY, where KEY is the optimizer's name for the tensor.
inline constexpr auto kOptimizerPrefix = "optimizer.";
/// The name of the random generator's state in files of other formats.
inline constexpr auto kGeneratorName = "generator.cpu";
/// The name of the random generator's state in a run. No name in a model begins with a dot, because no module or parameter has an empty
/// name.
inline constexpr auto kHiddenGeneratorName = ".generator.cpu";
/// The state of the generator of the rank's device has the name .generator.TYPE, such as .generator.cuda.
inline constexpr auto kGeneratorPrefix = ".generator.";
/// An extra tensor outside the model (Contents::tensors) has the name .tensors.NAME, which no tensor of a model can have.
inline constexpr auto kBesidePrefix = ".tensors.";

/// The part of a tensor that a rank has: the values of the slices one after the other, each in the memory order that the strides define.
struct PartRecord {
  std::vector<int64_t> shape, strides;  // of the full tensor
  std::vector<TensorSlice> slices;

  int64_t numel() const;
};
void to_json(nlohmann::json& json, const PartRecord& part);
void from_json(const nlohmann::json& json, PartRecord& part);

/// The parameters that a checkpoint leaves out, because the model gets them from a Base.
struct BaseRecord {
  std::string name = {}, checksum = {}, forms = {};  // of the Base; empty if nothing is left out
  std::set<std::string> parameters = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BaseRecord, name, checksum, forms, parameters)

struct RankRecord {
  int rank = 0, ranks = 1;
  uint64_t save = 0;                             // a random number for each save, which tells files of different saves apart
  std::map<std::string, PartRecord> parts = {};  // sharded parameters
  /// Tensors of the optimizer's state. A tensor with one value for each block of a parameter's values has its own one-dimensional slices.
  std::map<std::string, PartRecord> state = {};
  std::vector<std::string> whole = {};              // parameters that belong to no unit; only rank 0 writes them
  std::vector<std::string> buffers = {};            // each rank writes its own
  std::vector<std::string> beside = {};             // extra tensors that are the same on all ranks; only rank 0 writes them
  std::vector<std::string> by_rank = {};            // extra tensors of which each rank has rows of its own
  std::map<std::string, std::string> aliases = {};  // from each further name of a tied parameter to its first name
  std::string optimizer = {};                       // class of the optimizer; empty if there is none
  std::string generator = {};                       // name of the tensor with the CPU generator's state; empty if there is none
  std::string device_generator = {};                // the same for the device that the rank trains on
  std::map<std::string, std::string> notes = {};
  BaseRecord base = {};
  std::string adapters = {};  // described in words; empty if the model has none
  /// How the file was written, for people to read: the versions of the libraries, the layout and the mesh.
  std::map<std::string, std::string> origin = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankRecord, rank, ranks, save, parts, state, whole, buffers, beside, by_rank, aliases, optimizer,
                                   generator, device_generator, notes, base, adapters, origin)

/// Returns RankRecord::origin for files that this program writes.
std::map<std::string, std::string> origin_here(std::string layout, std::string mesh);
/// The record as metadata for the file's header.
std::map<std::string, std::string> to_metadata(const RankRecord& record);

struct RankFile {
  SafetensorsFile tensors;
  RankRecord record;
};

/// Returns the rank and the number of ranks in a name that ends in "rank-R-of-N" and the extension; nothing for other names.
std::optional<std::pair<int, int>> rank_in_name(std::string_view name, std::string_view extension);

std::filesystem::path rank_file(const std::filesystem::path& folder, int rank, int ranks);
/// Whether a name looks like the name of a rank's file, of any rank.
bool has_rank_file_name(std::string_view name);
/// Throws IoError if the file is missing or damaged, or if another rank has written it.
RankFile open_rank_file(const std::filesystem::path& folder, int rank, int ranks);
RankFile open_rank_file(SafetensorsFile file, int rank, int ranks);

/// Whether a safetensors file is the file of one rank of a checkpoint.
bool is_rank_file(const SafetensorsFile& file);

/// Throws IoError if the files come from different saves.
void expect_same_save(const RankFile& one, const RankFile& other);

/// The number of ranks that saved a checkpoint. Throws IoError if the folder is not a checkpoint, or files are missing.
int saved_ranks(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
