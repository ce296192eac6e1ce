// TreeFile: a run, or a part of it, as a file of torch.save.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/torch/file.h"

namespace tessera::checkpoint {

/// Makes trees, and collects the tensors in them in their order.
class TreeFile {
 public:
  explicit TreeFile(const RunSource& source) : source_(source) {}

  TorchTree model();
  TorchTree optimizer();
  /// With parameters by numbers, as in optimizer.state_dict(), and their names. Throws UsageError if their order is not known.
  TorchTree numbered_optimizer();
  TorchTree tensor(const SourceTensor& tensor) { return {add(tensor)}; }
  /// Writes the file, with the number of the save if it is one of several files. Collective.
  void write(const std::filesystem::path& path, const TorchTree& tree, std::optional<uint64_t> save = {});

 private:
  TorchTree::Tensor add(const SourceTensor& tensor);

  const RunSource& source_;
  std::vector<SourceTensor> tensors_;
};

}  // namespace tessera::checkpoint
