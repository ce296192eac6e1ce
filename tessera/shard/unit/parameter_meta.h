// The two handles of a sharded parameter, which agree about whether it trains: the whole one that the module's own member holds, and the
// shard. What users ask the whole one about its gradient is answered for its shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/shard/options.h"

namespace tessera {

/// Takes the place of libtorch's own record. A parameter that was a view when it was registered is none any more.
class UnshardedMeta final : public torch::autograd::AutogradMeta {
 public:
  /// Makes `whole` a member whose gradient is that of `shard`. Hooks that it had stay.
  static void replace(const at::Tensor& whole, const at::Tensor& shard, Listing listing);
  /// What was said of the member since the shard was asked last holds for the shard, and the other way round.
  bool agree() const;

  bool requires_grad() const override { return agree(); }
  /// Throws UsageError: the shard has it.
  const at::Tensor& grad() const override;
  /// The shard's, for those who clear it.
  at::Tensor& mutable_grad() override;

  /// Runs the hooks that were registered on the whole parameter.
  at::Tensor run_hooks(at::Tensor gradient) const;

  /// Whether graphs that are built now lead from the parameter to its unit.
  bool attached = false;

 private:
  UnshardedMeta(at::Tensor shard, bool speaks_for_it);

  const at::Tensor shard_;
  const bool speaks_for_it_;  // it is the shard of no other parameter
  mutable bool trains_;       // as both were known to say
};

/// Takes the place of libtorch's own record of a shard that is listed by name.
class ShardedMeta final : public torch::autograd::AutogradMeta {
 public:
  static void replace(const at::Tensor& shard, const at::Tensor& whole);

  bool requires_grad() const override;

 private:
  explicit ShardedMeta(const at::Tensor& whole);

  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> whole_;
};

/// Nothing if the tensor is no whole parameter of a unit: a view of one, for example.
UnshardedMeta* unsharded_meta(const at::Tensor& tensor);

}  // namespace tessera
