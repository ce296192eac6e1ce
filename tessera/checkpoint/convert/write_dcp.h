// DcpFolder: a run, or a part of it, as a folder of torch.distributed.checkpoint.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"

namespace tessera::checkpoint {

/// Writes the files of this process's ranks into the folder. All processes do so, and then close it together.
class DcpFolder {
 public:
  DcpFolder(const RunSource& source, const std::filesystem::path& folder);

  void add_model();
  void add_optimizer();
  void add_beside();
  /// Adds a value of rank 0.
  void add(const DcpPath& path, const nlohmann::json& value);
  void add(const DcpPath& path, const at::Tensor& tensor);
  /// Collective.
  void close();

 private:
  void add(const DcpPath& path, const SourceTensor& tensor);

  const RunSource& source_;
  const std::filesystem::path folder_;
  std::map<int, DcpRankWriter> writers_;
};

}  // namespace tessera::checkpoint
