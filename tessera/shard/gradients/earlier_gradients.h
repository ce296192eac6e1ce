// Which shards a reduction adds to, because they have kept their gradients since an earlier backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/weak_tensor.h"

namespace tessera {

class Unit;

/// If only some ranks clear gradients between two passes, the others step with the sum of both, unnoticed. A gradient that the program has
/// written since its pass does not count as kept: it may be zeros, which are as good as none.
class EarlierGradients {
 public:
  /// To be called when a pass reduces gradients of the unit. Returns a text for ranks to compare: empty if no shard has kept an earlier
  /// gradient.
  std::string note_reduction(const Unit& unit);
  /// To be called when the pass has ended and the shards have its gradients.
  void note_end_of_pass();
  void forget(const Unit& unit) { known_.erase(&unit); }

 private:
  /// Undefined if there is none. Weak, because another gradient could come to lie at the address of one that is gone.
  struct Left {
    WeakTensor gradient;
    int64_t version = 0;
  };
  struct Known {
    bool has_new = false;         // gradients of a pass that has not ended
    std::vector<Left> left = {};  // by the last pass, in the order of parameters_of()
  };
  static Left left_in(const at::Tensor& shard);

  std::map<const Unit*, Known> known_;
};

}  // namespace tessera
