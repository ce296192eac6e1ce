// ForwardRecord: what the forward of a segment has done, as far as its recomputation has to know.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tessera/shard/activation/operator_sequence.h"
#include "tessera/shard/activation/rng_autocast.h"
#include "tessera/shard/activation/saved_tensor.h"
#include "tessera/shard/activation/tensor_version.h"

namespace tessera::activation {

struct ForwardRecord {
  /// A change in place of memory that is not the segment's, such as running statistics. A recomputation repeats it on a copy.
  struct Write {
    WeakStorage storage;
    at::Tensor before;  // its bytes
  };
  /// An operator that is not to run again.
  struct Kept {
    struct Result {
      SavedTensor value;
      bool requires_grad;
      bool changes = false;  // in place, after the operator
    };
    /// A slot whose tensor is a view of one of the operator's operands.
    struct FromOperand {
      size_t slot, operand;
      std::vector<int64_t> sizes, strides;
      int64_t offset;  // from the operand's
    };
    size_t step = 0;  // of the sequence
    std::vector<Result> results = {};
    std::vector<FromOperand> slots = {};
    bool must_run = false;                   // its results are views of its operands, or no tensors, or it has failed
    std::optional<RngState> rng_after = {};  // of an operator that draws random numbers
  };

  KeepRule keep;
  OperatorSequence sequence = {};
  std::vector<std::optional<size_t>> saved = {};  // the slot of each tensor that was saved; none for those that stayed in memory
  std::vector<Write> writes = {};
  // Changed in place as well, but made by this forward. One that the program has kept would change twice.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> own_writes = {};
  std::vector<Kept> kept = {};
  std::vector<std::shared_ptr<ForwardRecord>> inner = {};  // of the segments in this one
};

}  // namespace tessera::activation
