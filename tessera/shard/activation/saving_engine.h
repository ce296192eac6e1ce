// What autograd saves for backward goes through us while a segment runs.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera::activation {

/// Takes the tensors that autograd saves in this thread, as long as the object exists. A newer one takes them from an older one.
class SavedTensors {
 public:
  SavedTensors();
  SavedTensors(const SavedTensors&) = delete;
  SavedTensors& operator=(const SavedTensors&) = delete;
  virtual ~SavedTensors();

  /// For one tensor that is about to be saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;

 private:
  SavedTensors* const outer_;
};

}  // namespace tessera::activation
