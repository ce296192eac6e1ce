// DcpFolder: a run, or a part of it, as a folder of torch.distributed.checkpoint.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/dcp.h"

namespace tessera::checkpoint {

/// One folder that is written by as many ranks as the options say, in this process.
class DcpFolder {
 public:
  DcpFolder(const RunSource& source, const std::filesystem::path& folder);

  void add_model();
  void add_optimizer();
  void add_beside();
  void add(const DcpPath& path, const nlohmann::json& value) { writers_.front()->write(path, value); }
  void add(const DcpPath& path, const at::Tensor& tensor);
  void close();

 private:
  void add(const DcpPath& path, const SourceTensor& tensor);

  const RunSource& source_;
  const std::filesystem::path folder_;
  std::vector<std::unique_ptr<DcpRankWriter>> writers_;
};

}  // namespace tessera::checkpoint
