// Segment: a part of a program whose activations are computed again in backward.
//
// Autograd builds the graph of a segment as ever, but what its nodes save goes through hooks, which keep the number of the slot instead of
// the values. The first node that asks for a slot in backward makes the segment run again; what it saves then fills the slots in the same
// order. So there is one graph and one backward pass, and units are reduced as they are without checkpointing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/shard/activation.h"
#include "tessera/shard/activation/course.h"
#include "tessera/shard/activation/held.h"
#include "tessera/shard/activation/surroundings.h"

namespace tessera::activation {

/// What the first run of a segment has done, as far as later ones have to know.
struct Log {
  /// A change in place of memory that is not the segment's, such as running statistics. Later runs repeat it on a copy.
  struct Write {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor before;  // its bytes
  };
  /// An operator that is not run again.
  struct Kept {
    struct Result {
      Held value;
      bool requires_grad;
      bool changes = false;  // in place, after the operator
    };
    /// A slot whose tensor is a view of one of the operator's operands.
    struct FromOperand {
      size_t slot, operand;
      std::vector<int64_t> sizes, strides;
      int64_t offset;  // from the operand's
    };
    size_t step = 0;  // of the course
    std::vector<Result> results = {};
    std::vector<FromOperand> slots = {};
    bool runs_again = false;                        // its results are views of its operands, or no tensors, or it has failed
    std::optional<RandomStates> random_after = {};  // of an operator that draws random numbers
  };

  KeepRule keep;
  Course course = {};
  std::vector<std::optional<size_t>> saved = {};  // the slot of each tensor that was saved; none for those that stayed in memory
  std::vector<Write> writes = {};
  // Changed in place as well, but made by the first run. One that the program has kept would change twice.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> own_writes = {};
  std::vector<Kept> kept = {};
  std::vector<std::shared_ptr<Log>> inner = {};  // of the segments in this one
};

/// The nodes of its graph own it.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  /// The module, or null, is what `again` calls.
  Segment(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again, const torch::nn::Module* module);

  const Options& options() const { return options_; }
  const std::shared_ptr<Log>& log() const { return log_; }

  // For the first run.
  void hold_input(const at::Tensor& input, Held held);
  /// Notes that the segment reads a tensor that is not its own, so that later runs find out whether that has changed.
  void note_read(const at::Tensor& tensor);
  void first_run_ends();
  size_t add_slot(const at::Tensor& tensor);

  // For later runs.
  /// Fills a slot. Ends the run by an exception when nothing is missing any more.
  void fill(size_t slot, const at::Tensor& tensor);

  at::Tensor value_of(size_t slot);
  void forget(size_t slot);

 private:
  struct Slot {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool wanted = true;
    at::Tensor value = {};
    uint32_t version = 0;
  };
  struct Input {
    Held held;
    bool requires_grad;
  };
  struct Read {
    c10::VariableVersion counter;
    uint32_t version;
    c10::StorageImpl* storage;  // only compared
  };

  void run_again();
  void expect_unchanged() const;

  const Options options_;
  const detail::Again again_;  // owns the module
  const torch::nn::Module* const module_;
  const std::shared_ptr<Log> log_;
  std::recursive_mutex mutex_;
  std::vector<Input> inputs_;
  std::vector<Slot> slots_;
  std::vector<Read> reads_;
  int64_t missing_ = 0;  // slots that a later run has yet to fill
  const std::vector<c10::Device> devices_;
  std::optional<RandomStates> random_;
  const AutocastState autocast_;
};

/// Throws UsageError: a tensor that has to be as it was in forward is not.
[[noreturn]] void refuse_change(const at::Tensor& tensor);

}  // namespace tessera::activation
