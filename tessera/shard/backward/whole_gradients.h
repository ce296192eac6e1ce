// The whole gradients of a unit, which the module's own members have for a while.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "tessera/shard/unit/unit.h"

namespace tessera {

class WholeGradients {
 public:
  /// Gathers the gradients. Throws UsageError if some wait for a reduction. Collective.
  explicit WholeGradients(std::shared_ptr<Unit> unit);
  WholeGradients(const WholeGradients&) = delete;
  WholeGradients& operator=(const WholeGradients&) = delete;
  ~WholeGradients();

  /// Gives the shards this rank's part of what the members have now. Throws UsageError if the gradients of the shards have changed, too.
  void write_back();

 private:
  std::shared_ptr<Unit> unit_;
  std::vector<at::Tensor> all_;                       // of each group; undefined if it has no gradients
  std::vector<std::pair<at::Tensor, int64_t>> seen_;  // the gradients of the shards, with their versions
};

/// The gradients of a group as one flat tensor that lies as the shards do, with zeros for those that there are not. Undefined if there are
/// none.
at::Tensor own_gradients(Unit& unit, const Unit::Group& group);

}  // namespace tessera
