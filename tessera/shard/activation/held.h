// Held: a tensor that a segment needs again in backward, wherever its values are until then.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>

#include "tessera/shard/activation.h"

namespace tessera::activation {

class Segment;
class Stowed;

class Held {
 public:
  Held() = default;
  /// Keeps the tensor in memory, without its graph. Changes in place make get() an error.
  static Held in_memory(const at::Tensor& tensor);
  /// Keeps the values where the options say.
  static Held stowed(const at::Tensor& tensor, const Options& options);
  /// Keeps no values: the segment computes them again. There may be only one for each slot, which ends with it.
  Held(std::shared_ptr<Segment> segment, size_t slot);

  Held(Held&& other) noexcept;
  Held& operator=(Held&& other) noexcept;
  ~Held();

  /// The values, without a graph.
  at::Tensor get() const;
  /// Whether the values are, or were, those in this memory.
  bool is_of(const c10::StorageImpl* storage) const;
  /// Makes sure of a copy, because an operator is about to change the values in place.
  void separate();

 private:
  struct InMemory {
    at::Tensor tensor;
    uint32_t version;
  };
  struct InSlot {
    std::shared_ptr<Segment> segment;
    size_t slot;
  };
  std::variant<std::monostate, InMemory, InSlot, std::shared_ptr<Stowed>> where_;
};

/// The number that changes in place change. Of tensors that count none, 0.
uint32_t version_of(const at::Tensor& tensor);

/// A tensor over the same memory, without a graph, that shares its version.
at::Tensor without_graph(const at::Tensor& tensor);

}  // namespace tessera::activation
