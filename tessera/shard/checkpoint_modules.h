// Activation checkpointing of whole modules; see activation.h.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "tessera/base/module_ref.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/call.h"
#include "tessera/shard/wrap.h"

namespace tessera::activation {

/// Runs tessera::call(module, inputs...) as a checkpointed segment.
template <class M, class... Inputs>
  requires IsModule<M>
auto checkpoint(const Options& options, const M& module, Inputs&&... inputs) {
  const auto run = [module = pointer_of(module)](auto&&... values) { return call(module, std::forward<decltype(values)>(values)...); };
  return checkpoint(options, detail::CallOf{&*pointer_of(module), run}, std::forward<Inputs>(inputs)...);
}
template <class M, class... Inputs>
  requires IsModule<M>
auto checkpoint(const M& module, Inputs&&... inputs) {
  return checkpoint(Options{}, module, std::forward<Inputs>(inputs)...);
}

/// Makes each later call of the module by tessera::call(module, x...) or through FullyShardedDataParallel a checkpointed segment. May be
/// called before or after fully_shard. Tessera can't see plain calls, so they are an error if parameters of the module are sharded.
void checkpoint_module(const std::shared_ptr<torch::nn::Module>& module, const Options& options = {});
template <class Holder>
  requires requires(const Holder& holder) { holder.ptr()->named_parameters(); }
void checkpoint_module(const Holder& holder, const Options& options = {}) {
  checkpoint_module(std::shared_ptr<torch::nn::Module>(holder.ptr()), options);
}

/// Calls checkpoint_module for all modules in the model that the policy chooses.
void checkpoint_modules(ModuleRef model, const WrapPolicy& policy, const Options& options = {});

/// Runs sequential->forward(x) in `segments` segments of about equal numbers of modules. Checkpoints all segments but the last, whose
/// activations backward needs at once.
at::Tensor checkpoint_sequential(const std::shared_ptr<torch::nn::SequentialImpl>& sequential, int64_t segments, at::Tensor x,
                                 const Options& options = {});
template <class Holder>
  requires requires(const Holder& holder) { std::shared_ptr<torch::nn::SequentialImpl>(holder.ptr()); }
at::Tensor checkpoint_sequential(const Holder& holder, int64_t segments, at::Tensor x, const Options& options = {}) {
  return checkpoint_sequential(std::shared_ptr<torch::nn::SequentialImpl>(holder.ptr()), segments, std::move(x), options);
}

}  // namespace tessera::activation
