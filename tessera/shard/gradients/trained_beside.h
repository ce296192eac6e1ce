// Notices tensors in no unit that are trained along with the units of a model, though nobody averages their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/weak_tensor.h"
#include "tessera/comm/communicator.h"

namespace tessera {

/// A parameter of an outer module for which nobody has called fully_shard, or of a loss with weights of its own, gets this rank's gradient.
/// An optimizer then moves it apart on each rank. What it looks like on the ranks travels with what they compare anyway, so there is no
/// exchange for it, and nothing to compare where everything that is trained is in units.
class TrainedBeside {
 public:
  /// `world`: the ranks of the model.
  explicit TrainedBeside(Communicator world);

  /// Looks through the graph of the backward pass that this thread runs, once for each graph.
  void look_at_graph();
  /// For ranks to compare in the reductions of that graph: empty if none of the tensors has changed. To read a tensor takes time, so it is
  /// looked at in the pass that finds it, in the first after that, the second, the fourth and so on.
  const std::string& words() const { return words_; }

 private:
  struct Leaf {
    WeakTensor tensor;
    uint64_t values = 0;  // a hash of them, when it was looked at last
    uint64_t passes = 0;  // since it was found
  };

  std::string describe_changes();

  const Communicator world_;
  const bool is_open_;  // whether there are other ranks to compare with
  int graph_ = -1;      // that was looked at last
  size_t nodes_ = 0;    // of it
  std::string words_;
  std::vector<Leaf> leaves_;
};

}  // namespace tessera
