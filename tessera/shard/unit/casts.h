// Casts activations to the dtype of a unit's parameters. An activation that meets several parameters of the unit is cast once.
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
    Weak result;  // weak, because its graph may own the unit
  };
  std::vector<Cast> known_;
};

}  // namespace tessera
