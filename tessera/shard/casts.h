// Operands in the dtype of a unit's parameters: the same one twice in a visit is cast once.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace tessera {

class Casts {
 public:
  /// `user` tells the operators of a pass apart.
  at::Tensor cast(const at::Tensor& operand, at::ScalarType dtype, uint64_t user);
  void clear() { known_.clear(); }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Cast {
    Weak operand;
    uint32_t version;
    c10::SmallVector<uint64_t, 4> users;
    at::Tensor result;     // without a graph: then nobody else keeps it
    Weak result_in_graph;  // which may lead back to the unit
  };
  std::vector<Cast> known_;
};

}  // namespace tessera
