// The whole gradients of a unit, which the module's own members have for a while.
#pragma once

#include <memory>
#include <string>
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

  /// Gives the shards this rank's part of what the members have now. Throws on all ranks, and writes nothing, if the gradients of the shards
  /// have changed, too, if one has another shape than its parameter, or if the ranks have gradients of different parameters. Collective.
  void write_back();
  /// For a rank that is on its way out of an exception, while others may be elsewhere: compares nothing.
  void write_back_alone();
  /// Gives the shards NaN for gradients, and makes steps and norms an error until they have others: those that the program wanted are not
  /// there.
  void lose(const std::string& why);

 private:
  void expect_sound() const;
  void hand_over();

  std::shared_ptr<Unit> unit_;
  std::vector<at::Tensor> all_;                       // of each group; undefined if it has no gradients
  std::vector<std::pair<at::Tensor, int64_t>> seen_;  // the gradients of the shards, with their versions
};

/// The gradients of a group as one flat tensor that lies as the shards do, with zeros for those that there are not. Undefined if there are
/// none.
at::Tensor own_gradients(Unit& unit, const Unit::Group& group);

}  // namespace tessera
