// Folders of torch.distributed.checkpoint: `.metadata`, a pickle that says where each value is, and files `__RANK_N.distcp`, in which each
// part of a tensor and each other value is an archive of torch.save.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/tensor_slice.h"
#include "tessera/checkpoint/formats/torch/writer.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// Reads the tensors of a folder and its plain values; the names of other values are in Catalog::left_out. Ignores files that `.metadata`
/// does not name. Throws IoError for damage and, in a folder that Tessera wrote, for a file of another save.
Catalog read_dcp(const std::filesystem::path& folder);

/// The dict keys and list indices that lead to a value in the state. Joined by dots, they are the value's name.
using DcpPath = std::vector<std::variant<std::string, int64_t>>;

/// A part of a tensor, or another value, that a rank has written. It can be sent to rank 0 as JSON.
struct DcpItem {
  struct Part {
    at::ScalarType dtype = at::kFloat;
    TensorSlice box;
  };
  DcpPath path = {};
  std::optional<Part> part = {};  // if the item is a part of a tensor
  std::string file = {};
  uint64_t offset = 0, bytes = 0;
  std::string checksum = {};  // TorchArchive::checksum
};
void to_json(nlohmann::json& json, const DcpItem& item);
void from_json(const nlohmann::json& json, DcpItem& item);

/// Writes the values of one rank to the file `__RANK_0.distcp` in an existing folder.
class DcpRankWriter {
 public:
  DcpRankWriter(const std::filesystem::path& folder, int rank);

  /// Writes the values of a box of a tensor, or what `fill` appends to the archive.
  void write(const DcpPath& path, const TensorSlice& box, const at::Tensor& values);
  void write(const DcpPath& path, const TensorSlice& box, at::ScalarType dtype, c10::function_ref<void(TorchArchiveWriter& archive)> fill);
  void write(const DcpPath& path, const pickle::Value& value);
  /// Gives the file its name. Returns its items, for write_dcp_metadata().
  std::vector<DcpItem> close();

 private:
  /// Closes the archive of an item, and records its place in the file.
  void add(DcpItem item, TorchArchiveWriter& archive);

  std::string name_;
  NewFile file_;
  uint64_t end_ = 0;
  std::vector<DcpItem> items_;
};

/// Writes `.metadata`, which makes the folder a checkpoint. One rank calls it, after all ranks have closed their files. If several ranks
/// have written the same box or value, `.metadata` names one of them. `.metadata` also has the checksums of the archives and the number of
/// the save. Throws UsageError if the boxes of a tensor overlap or do not cover it.
void write_dcp_metadata(const std::filesystem::path& folder, std::span<const DcpItem> items, uint64_t save = 0);

}  // namespace tessera::checkpoint
