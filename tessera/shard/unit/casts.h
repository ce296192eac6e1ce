// Casts activations to the dtype of a unit's parameters. An activation that meets several parameters of the unit is cast once.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/base/weak_tensor.h"

namespace tessera {

class Casts {
 public:
  at::Tensor cast(const at::Tensor& operand, at::ScalarType dtype);
  void clear() { known_.clear(); }

 private:
  struct Cast {
    WeakTensor operand;
    uint32_t version;
    WeakTensor result;  // weak, because its graph may own the unit
  };
  std::vector<Cast> known_;
};

}  // namespace tessera
