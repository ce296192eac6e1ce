// SavedTensor: a tensor that backward needs, wherever its values are until then: in memory, offloaded, or nowhere, to be recomputed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>

#include "tessera/shard/activation_options.h"

namespace tessera::activation {

class Offloaded;
class Slots;

class SavedTensor {
 public:
  SavedTensor() = default;
  /// Keeps the tensor in memory, without its graph. Changes in place make get() an error.
  static SavedTensor in_memory(const at::Tensor& tensor);
  /// Keeps the values where the options say.
  static SavedTensor offloaded(const at::Tensor& tensor, const Options& options);
  /// Keeps no values: they are recomputed. There may be only one for each slot, which it releases.
  SavedTensor(std::shared_ptr<Slots> slots, size_t slot);

  SavedTensor(SavedTensor&& other) noexcept;
  SavedTensor& operator=(SavedTensor&& other) noexcept;
  ~SavedTensor();

  /// The values, without a graph.
  at::Tensor get() const;
  /// Whether the values are, or were, those in this memory.
  bool is_of(const c10::StorageImpl* storage) const;
  /// Makes sure of a copy, because an operator is about to change the memory in place.
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
