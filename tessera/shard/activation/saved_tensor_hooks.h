// What autograd saves for backward goes through us while a segment runs, as in torch.autograd.graph.saved_tensors_hooks.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera::activation {

/// Takes the tensors that autograd saves in this thread, as long as the object exists. A newer one takes them from an older one.
class SavedTensorHooks {
 public:
  SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;
  virtual ~SavedTensorHooks();

  /// For one tensor that is about to be saved.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;

 private:
  SavedTensorHooks* const outer_;
};

}  // namespace tessera::activation
