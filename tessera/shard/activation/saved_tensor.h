// SavedTensor: a tensor that backward needs, wherever its values are until then: in memory, offloaded, or nowhere, to be recomputed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "tessera/base/no_copy.h"
#include "tessera/shard/activation_options.h"

namespace tessera::activation {

class Slots;
struct Offloaded;

/// Thrown to end a recomputation early, when no slot is empty. Not a std::exception, so that no code in between takes it for an error.
struct StopRecompute {
  const Slots* filled;
};

/// Takes the place of saved tensors in the graph of a segment. A slot has no value until backward asks for one; then the segment
/// recomputes, and the tensors that autograd saves meanwhile fill the slots in the same order.
class Slots : public std::enable_shared_from_this<Slots>, NoCopy {
 public:
  virtual ~Slots() = default;

  /// Adds an empty slot for a tensor of the same shape and dtype. Returns the slot's number.
  size_t add(const at::Tensor& tensor);
  /// Returns the value, for which the segment recomputes if necessary.
  at::Tensor value_of(size_t slot);
  /// To be called when the slot is not needed any more.
  void release(size_t slot);
  /// Called while the segment recomputes. Throws UsageError if forward has saved a tensor of another shape or dtype.
  void fill(size_t slot, const at::Tensor& tensor);

 protected:
  /// Fills all slots except released ones.
  virtual void recompute() = 0;
  /// Called when the backward pass in which the segment has recomputed is over.
  virtual void end_pass() {}

 private:
  struct Slot {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    bool needed = true;
    at::Tensor value = {};
    uint32_t version = 0;

    bool is_missing() const { return needed && !value.defined(); }
  };

  std::recursive_mutex mutex_;
  std::vector<Slot> slots_;
  int64_t missing_ = 0;  // number of slots that are still to be filled
};

class SavedTensor {
 public:
  SavedTensor() = default;
  /// Keeps the tensor in memory, without its graph. Changes in place make get() an error.
  static SavedTensor in_memory(const at::Tensor& tensor);
  /// Keeps the values where the options say. Leaves stay in memory, because the program keeps them anyway. If a fraction of the bytes goes
  /// to disk, it consists of whole tensors. The system writes files while forward continues; a copy from a device is queued after the
  /// operators that compute the values.
  static SavedTensor offloaded(const at::Tensor& tensor, const Options& options);
  /// Keeps no values; get() recomputes them. Only one SavedTensor may be made for each slot; its last copy releases the slot.
  SavedTensor(const std::shared_ptr<Slots>& slots, size_t slot);

  /// Returns the values, without a graph.
  at::Tensor get() const;
  /// Whether the values are, or were, in this storage.
  bool is_of(const c10::StorageImpl* storage) const;
  /// Copies values that are in memory, because an operator is about to change that memory in place.
  void copy_values();

 private:
  struct InMemory {
    at::Tensor tensor;
    uint32_t version;
  };
  struct InSlot {
    std::shared_ptr<Slots> slots;
    size_t slot;
  };
  std::variant<std::monostate, InMemory, InSlot, std::shared_ptr<const Offloaded>> where_;
};

}  // namespace tessera::activation
