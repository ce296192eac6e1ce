// GradientWatch: checks of the gradients of all units of a model that span several backward passes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/weak_tensor.h"
#include "tessera/comm/communicator.h"

namespace tessera {

class Unit;

/// Whether the backward pass of this thread computes only the gradients of chosen tensors (autograd::grad, or backward with inputs).
bool asks_for_chosen_gradients();

/// Notices that all ranks of a model learn from the same batches, as they do under a sampler that does not know ranks. Equal batches give
/// equal gradients on all ranks, so a rank's own gradients equal the mean over all ranks. Rank 0 compares a few values of its own gradients
/// and of the mean, without any exchange, until they differ for the first time. It warns once if they are equal in many passes in a row.
class EqualBatches {
 public:
  /// `world`: the ranks of the model.
  explicit EqualBatches(Communicator world) : world_(std::move(world)) {}

  /// Takes this rank's gradients in a unit's buffer before the mean is taken; `count` values from `begin` on belong to its own shards.
  void note_own(const Unit& unit, const at::Tensor& gradients, int64_t begin, int64_t count) {
    if (is_open_) keep(unit, gradients.narrow(0, begin, count));
  }
  /// To be called when a unit leaves the model, because units are known by address.
  void forget(const Unit& unit) { seen_.erase(&unit); }
  /// Takes the mean over all ranks of the values that note_own() took.
  void note_mean(const Unit& unit, const at::Tensor& mean) {
    if (is_open_) compare(unit, mean);
  }

 private:
  struct Seen {
    at::Tensor own = {};  // a few values
    int times = 0;        // passes in a row in which the mean was equal to `own`
  };

  void keep(const Unit& unit, const at::Tensor& gradients);
  void compare(const Unit& unit, const at::Tensor& mean);
  void close();

  const Communicator world_;
  bool is_open_ = true;  // whether there is anything left to find out
  std::map<const Unit*, Seen> seen_;
};

/// Tracks which shards have kept their gradients since an earlier backward pass, so that a reduction adds to these gradients. If only some
/// ranks clear gradients between two passes, the other ranks step with the sum of the gradients of both passes, and nothing shows it. A
/// gradient that the program has written since its pass does not count as kept: it may be zeros, which are as good as none.
class EarlierGradients {
 public:
  /// To be called when a pass reduces gradients of the unit. Returns a text for ranks to compare: empty if no shard has kept an earlier
  /// gradient.
  std::string note_reduction(const Unit& unit);
  /// To be called when the pass has ended and the shards have its gradients.
  void note_end_of_pass();
  void forget(const Unit& unit) { known_.erase(&unit); }

 private:
  /// The gradient that a pass left in a shard; undefined if there is none. The reference is weak, so that a new gradient at the address of
  /// a destroyed gradient is not taken for it.
  struct Left {
    WeakTensor gradient;
    int64_t version = 0;
  };
  struct Known {
    bool has_new = false;         // whether a pass that has not ended has reduced gradients of the unit
    std::vector<Left> left = {};  // the gradients that the last pass left, in the order of parameters_of()
  };
  static Left left_in(const at::Tensor& shard);

  std::map<const Unit*, Known> known_;
};

/// Notices tensors in no unit that are trained along with the units of a model, though nobody averages their gradients. A parameter of an
/// outer module that was not sharded, or of a loss with weights of its own, gets only this rank's gradient, so an optimizer moves it apart
/// on each rank. A hash of such tensors travels in the texts that ranks compare in each reduction anyway, so it needs no exchange of its
/// own. If all trained parameters are in units, there is nothing to compare.
class TrainedBeside {
 public:
  /// `world`: the ranks of the model.
  explicit TrainedBeside(Communicator world);

  /// Looks through the graph of the backward pass that this thread runs, once for each graph.
  void look_at_graph();
  /// A text for ranks to compare in the reductions of the last graph that look_at_graph() has seen: empty if none of the tensors has
  /// changed. Reading a tensor takes time, so a tensor is read only in the pass that finds it, and in the first, second, fourth, eighth
  /// (and so on) pass after that.
  const std::string& words() const { return words_; }

 private:
  struct Leaf {
    WeakTensor tensor;
    uint64_t values = 0;  // a hash of the tensor's values when they were last read
    uint64_t passes = 0;  // passes since the tensor was found
  };

  std::string describe_changes();

  const Communicator world_;
  const bool is_open_;  // whether there are other ranks to compare with
  int graph_ = -1;      // the graph that was looked at last
  size_t nodes_ = 0;    // number of nodes of that graph
  std::string words_;
  std::vector<Leaf> leaves_;
};

struct GradientWatch {
  /// `world`: the ranks of the model.
  explicit GradientWatch(const Communicator& world) : equal_batches(world), beside(world) {}

  /// To be called when a unit leaves the model, because units are known by address.
  void forget(const Unit& unit) {
    equal_batches.forget(unit);
    earlier.forget(unit);
  }

  EqualBatches equal_batches;
  EarlierGradients earlier;
  TrainedBeside beside;
  uint64_t evaluations = 0;  // how many evaluations have begun; consecutive passes without gradients count as one
};

}  // namespace tessera
