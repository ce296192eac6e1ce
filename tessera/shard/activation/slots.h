// Slots: what the graph of a segment has in place of saved tensors. A slot has no value until backward asks for one; then the segment
// recomputes, and what autograd saves meanwhile fills the slots in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera::activation {

class Slots;

/// Ends a recomputation early, when no slot is empty. No std::exception, so that nothing in between takes it for an error.
struct StopRecompute {
  const Slots* filled;
};

class Slots : public std::enable_shared_from_this<Slots> {
 public:
  Slots() = default;
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;
  virtual ~Slots() = default;

  /// An empty slot for a tensor like this one; its number.
  size_t add(const at::Tensor& tensor);
  /// The value, for which the segment recomputes if necessary.
  at::Tensor value_of(size_t slot);
  /// The slot is not needed any more.
  void release(size_t slot);
  /// Called while the segment recomputes. Throws UsageError if forward has saved another kind of tensor.
  void fill(size_t slot, const at::Tensor& tensor);

 protected:
  /// Fills all slots, but for those that are released.
  virtual void recompute() = 0;

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
  int64_t missing_ = 0;  // slots that are still to be filled
};

}  // namespace tessera::activation
