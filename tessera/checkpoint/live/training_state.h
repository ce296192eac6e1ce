// The state that a checkpoint holds for each parameter besides its values: the optimizer's state, and the moving average.
#pragma once

#include <map>
#include <set>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// Returns the state by names of parameters. The average has its own key.
std::map<std::string, optim::ParameterState> training_state(const Contents& contents);

/// The state in a checkpoint, with the keys of the optimizer that was saved. A tensor that can be read straight into the optimizer's memory
/// has only sizes (device "meta") until load() reads it.
class SavedState {
 public:
  /// Leaves out parameters `elsewhere`, which only other ranks have, and parameters that match options.may_be_unknown. Throws UsageError
  /// for state that can't be sharded as the model is, or does not fit the optimizer and the average. The arguments must outlive this
  /// object. `where` is the checkpoint in errors.
  SavedState(const Contents& contents, const Manifest& manifest, const CatalogReader& stored, const std::set<std::string>& elsewhere,
             const LoadOptions& options, const Communicator& world, const std::string& where);
  void load() const;

 private:
  void expect_average() const;
  /// Returns the optimizer's state without the average, under the keys of contents.optimizer.
  std::map<std::string, optim::ParameterState> of_optimizer() const;
  bool reads_in_place(const std::string& name, const at::Tensor& parameter) const;
  void read_in_place(const std::string& name, const at::Tensor& parameter, const at::Tensor& to) const;
  at::Tensor read(const std::string& name, const at::Tensor& parameter) const;

  const Contents& contents_;
  const Manifest& manifest_;
  const CatalogReader& stored_;
  const Communicator& world_;
  std::map<std::string, optim::ParameterState> state_ = {};
};

}  // namespace tessera::checkpoint
