// TreeFile: a run, or a part of it, as a file of torch.save.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/torch/file.h"

namespace tessera::checkpoint {

/// A tree, and the tensors in it in its order.
class TreeFile {
 public:
  explicit TreeFile(const RunSource& source) : source_(source) {}

  TorchTree model();
  TorchTree optimizer();
  /// By numbers, as optimizer.state_dict() has it, and with the names. Throws UsageError where the order of the parameters is not known.
  TorchTree numbered_optimizer();
  TorchTree tensor(const SourceTensor& tensor) { return {add(tensor)}; }
  /// With the number of the save, where the file is one of several. Collective.
  void write(const std::filesystem::path& path, const TorchTree& tree, std::optional<uint64_t> save = {});

 private:
  TorchTree::Tensor add(const SourceTensor& tensor);

  const RunSource& source_;
  std::vector<SourceTensor> tensors_;
};

}  // namespace tessera::checkpoint
