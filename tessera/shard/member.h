// The whole parameter as the module's own member holds it: what its users ask of it about gradients is answered for its shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {

/// Takes the place of libtorch's own record. A parameter that was a view when it was registered is none any more.
class Member final : public torch::autograd::AutogradMeta {
 public:
  /// Makes `whole` a member whose gradient is that of `shard`. Hooks that it had stay.
  static void replace(const at::Tensor& whole, const at::Tensor& shard);

  /// Whether the shard trains. What was last said of the shard or of the member holds for both.
  bool requires_grad() const override;
  /// Throws UsageError: the shard has it.
  const at::Tensor& grad() const override;
  /// The shard's, for those who clear it.
  at::Tensor& mutable_grad() override;

  /// Runs the hooks that were registered on the whole parameter.
  at::Tensor run_hooks(at::Tensor gradient) const;

  /// Whether graphs that are built now lead from the parameter to its unit.
  bool attached = false;

 private:
  explicit Member(at::Tensor shard);

  const at::Tensor shard_;
  mutable bool trains_;  // as both were known to say
};

/// Nothing if the tensor is no whole parameter of a unit: a view of one, for example.
Member* member_of(const at::Tensor& tensor);

}  // namespace tessera
