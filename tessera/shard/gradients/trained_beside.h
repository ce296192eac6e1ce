// Notices tensors in no unit that are trained along with the units of a model, though nobody averages their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/weak_tensor.h"
#include "tessera/comm/communicator.h"

namespace tessera {

/// A parameter of an outer module that was not sharded, or of a loss with weights of its own, gets only this rank's gradient, so an
/// optimizer moves it apart on each rank. A hash of its values travels with the texts that ranks compare anyway. So there is no exchange
/// for it, and nothing to compare if all trained parameters are in units.
class TrainedBeside {
 public:
  /// `world`: the ranks of the model.
  explicit TrainedBeside(Communicator world);

  /// Looks through the graph of the backward pass that this thread runs, once for each graph.
  void look_at_graph();
  /// A text for ranks to compare in the reductions of that graph: empty if none of the tensors has changed. Reading a tensor takes time, so
  /// it is read in the pass that finds it, in the first after that, the second, the fourth and so on.
  const std::string& words() const { return words_; }

 private:
  struct Leaf {
    WeakTensor tensor;
    uint64_t values = 0;  // a hash of them when it was last read
    uint64_t passes = 0;  // since it was found
  };

  std::string describe_changes();

  const Communicator world_;
  const bool is_open_;  // whether there are other ranks to compare with
  int graph_ = -1;      // the graph that was looked at last
  size_t nodes_ = 0;    // of that graph
  std::string words_;
  std::vector<Leaf> leaves_;
};

}  // namespace tessera
