// The autograd records (AutogradMeta) of a sharded parameter's two handles: the unsharded parameter in the module's own member, and the
// shard. They keep requires_grad the same on both handles, and redirect requests for the gradient of the unsharded parameter to the shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/shard/options.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/weight_forms.h"

namespace tessera {

/// The autograd record of a weight, sharded or not, whose operators may be replaced or that is held in another form. It replaces libtorch's
/// own record, so a parameter that was a view when it was registered stops being one.
class WeightMeta : public torch::autograd::AutogradMeta {
 public:
  /// Returns the record of the weight. Gives the weight a record if it has none.
  static WeightMeta& of(const at::Tensor& weight);

  /// Throws UsageError if the program has set requires_grad on a weight that is held in another form.
  bool requires_grad() const override;

  std::shared_ptr<const WeightOperator> instead;  // the function that replaces the weight's operators; null if there is none
  std::shared_ptr<const HeldForm> form;           // set for a weight that is held in another form, and for the tensor that holds it
  at::Tensor held;                                // for a weight that is held in another form: the tensor that holds it
};

/// Returns the WeightMeta of a tensor. Null if it has none, also for a view of a tensor that has a WeightMeta.
WeightMeta* weight_meta(const at::Tensor& tensor);

/// The autograd record of an unsharded parameter.
class UnshardedMeta final : public WeightMeta {
 public:
  /// Installs the record on `unsharded`. Hooks that were registered on the tensor are kept.
  static void replace(const at::Tensor& unsharded, const at::Tensor& shard, Listing listing);
  /// Copies a change of requires_grad on either handle to the other handle, and returns the common value. Throws UsageError if
  /// requires_grad was changed on a single parameter of a unit with Listing::Flat.
  bool agree() const;

  bool requires_grad() const override { return agree(); }
  /// Returns the whole gradient while a WholeGradients exists. Otherwise throws UsageError, because only the shard has a gradient.
  const at::Tensor& grad() const override;
  /// Returns the whole gradient while a WholeGradients exists. Otherwise returns the shard's gradient, so that code which clears gradients
  /// works on either handle.
  at::Tensor& mutable_grad() override;

  const at::Tensor& shard() const { return shard_; }

  /// Runs the hooks that were registered on the unsharded parameter.
  at::Tensor run_hooks(at::Tensor gradient) const;

  /// Whether the parameter has a gradient edge to its unit's node, so that new graphs lead to that node.
  bool attached = false;
  /// Set while a WholeGradients exists: the whole gradient, or an undefined tensor if the parameter has none.
  std::optional<at::Tensor> whole_gradient;

 private:
  UnshardedMeta(at::Tensor shard, bool has_own_shard);

  const at::Tensor shard_;
  const bool has_own_shard_;  // false with Listing::Flat, where all parameters of a group have one shard
  mutable bool trains_;       // requires_grad of both handles when they last agreed
};

/// The autograd record of a shard with Listing::ByName. It replaces libtorch's own record.
class ShardedMeta final : public torch::autograd::AutogradMeta {
 public:
  static void replace(const at::Tensor& shard, const at::Tensor& unsharded);

  bool requires_grad() const override;

 private:
  explicit ShardedMeta(const at::Tensor& unsharded);

  const WeakTensor unsharded_;
};

/// Returns the UnshardedMeta of an unsharded parameter. Null for any other tensor, also for a view of an unsharded parameter.
UnshardedMeta* unsharded_meta(const at::Tensor& tensor);

/// Whether the parameter is trainable. Returns false if its unsharded tensor no longer exists, for example because its module was taken out
/// of the model.
bool trains(const Unit::Parameter& parameter);
/// Whether some of the unit's parameters are trained at the moment.
bool is_trained(const Unit& unit);

// The functions below are about weights whose operators are replaced (shard/weight_operator.h).

/// Runs the function that replaces the operator `name` of the weight, and returns its result; returns nothing if no function replaces it.
/// `weight` may also be a view that note_transposed() has marked.
std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments);
/// Marks `view` as weight.t().
void note_transposed(const at::Tensor& weight, const at::Tensor& view);
/// Whether operators of the weight are replaced, but it is neither sharded nor held in another form.
bool is_only_replaced(const at::Tensor& weight);
/// Gives `values` the paging key, because set_data is about to make them the values of a weight for which is_only_replaced() is true.
/// Paging then still sees the weight's operators.
void keep_replaced(const at::Tensor& values);
/// Computes the values of a weight that is held in another form, or of its view that note_transposed() has marked. Undefined for any other
/// tensor.
at::Tensor decoded(const at::Tensor& weight);
/// Whether this thread runs operators as they are, without replacing any.
bool& runs_plainly();

}  // namespace tessera
