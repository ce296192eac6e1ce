// Activations in the dtype of a unit's parameters: the same one twice in a visit is cast once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

class Casts {
 public:
  at::Tensor cast(const at::Tensor& operand, at::ScalarType dtype);
  void clear() { known_.clear(); }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Cast {
    Weak operand;
    uint32_t version;
    Weak result;  // which may lead back to the unit
  };
  std::vector<Cast> known_;
};

}  // namespace tessera
