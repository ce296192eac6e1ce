// The whole gradients of a unit, which the module's members have inside full_params.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/shard/unit/unit.h"

namespace tessera {

class WholeGradients {
 public:
  /// Gathers the gradients. Throws UsageError if some gradients still wait for a reduction. Collective.
  explicit WholeGradients(std::shared_ptr<Unit> unit);
  WholeGradients(const WholeGradients&) = delete;
  WholeGradients& operator=(const WholeGradients&) = delete;
  ~WholeGradients();

  /// Gives the shards this rank's part of the members' gradients. Throws on all ranks, and writes nothing, if the gradients of the shards
  /// have changed as well, if a gradient has another shape than its parameter, or if the ranks have gradients of different parameters.
  /// `alone`: this rank unwinds an exception, so it compares nothing with other ranks, which may be elsewhere in the program. Collective
  /// unless `alone`.
  void write_back(bool alone);
  /// Fills the gradients of the shards with NaN, and makes steps and norms an error until there are new gradients, because the gradients
  /// that the program has written are lost.
  void lose(const std::string& why);

 private:
  void expect_sound() const;
  void hand_over();

  std::shared_ptr<Unit> unit_;
  std::vector<at::Tensor> all_;                       // the whole gradients of each group; undefined if the group has none
  std::vector<std::pair<at::Tensor, int64_t>> seen_;  // the gradients of the shards, with their versions
};

/// The gradients of a group's shards as one flat tensor in the layout of the shards, with zeros for missing gradients. Undefined if no
/// shard has a gradient.
at::Tensor own_gradients(Unit& unit, const Unit::Group& group);

}  // namespace tessera
