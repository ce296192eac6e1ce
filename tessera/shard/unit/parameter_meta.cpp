#include "tessera/shard/unit/parameter_meta.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_gradient(const at::Tensor& shard) {
  const auto found = locate(shard);
  const auto which = found.parameter == nullptr ? std::string("a sharded parameter") : fmt::format("'{}'", found.parameter->name);
  throw UsageError(
      "{} was asked for its gradient, but its gradient is with its shard, which model->parameters() returns: take shard.grad(), or "
      "tessera::full_grad(shard) for the whole gradient, or full_params with WithGradients::Yes to change it. Make optimizers after "
      "fully_shard; a torch::optim optimizer that was made before can be moved by tessera::rebind(optimizer, model)",
      which);
}

}  // namespace

WeightMeta& WeightMeta::of(const at::Tensor& weight) {
  if (auto* const known = weight_meta(weight)) return *known;
  auto meta = std::make_unique<WeightMeta>();
  if (auto* before = torch::autograd::impl::get_autograd_meta(weight)) {
    meta->name_ = before->name_;
    meta->grad_ = before->grad_;
    meta->grad_accumulator_ = before->grad_accumulator_;
    meta->requires_grad_ = before->requires_grad_;
    meta->hooks_ = std::move(before->hooks_);
    meta->cpp_hooks_list_ = before->cpp_hooks_list_;
    meta->post_acc_grad_hooks_ = std::move(before->post_acc_grad_hooks_);
  }
  auto* const impl = weight.unsafeGetTensorImpl();
  impl->set_version_counter(c10::VariableVersion(weight._version()));  // a former view shared the counter of its base
  impl->set_autograd_meta(std::move(meta));
  return *weight_meta(weight);
}

bool WeightMeta::requires_grad() const {
  if (requires_grad_ && held.defined())
    throw UsageError("a weight that is held as {} can't train; leave it out of what is quantised", form->name);
  return AutogradMeta::requires_grad();
}

WeightMeta* weight_meta(const at::Tensor& tensor) {
  return dynamic_cast<WeightMeta*>(tensor.unsafeGetTensorImpl()->autograd_meta());
}

const HeldForm* held_form(const at::Tensor& tensor) {
  const auto* const meta = tensor.defined() ? weight_meta(tensor) : nullptr;
  return meta == nullptr ? nullptr : meta->form.get();
}

at::Tensor held_values(const at::Tensor& weight) {
  const auto* const meta = weight_meta(weight);
  return meta != nullptr && meta->held.defined() ? meta->held : weight;
}

UnshardedMeta::UnshardedMeta(at::Tensor shard, bool has_own_shard)
    : shard_(std::move(shard)), has_own_shard_(has_own_shard), trains_(shard_.requires_grad()) {
  requires_grad_ = trains_;
  // register_hook() adds hooks to this list. Without it, libtorch would make a list that belongs only to the current autograd node.
  cpp_hooks_list_ = std::make_shared<torch::autograd::hooks_list>();
}

void UnshardedMeta::replace(const at::Tensor& unsharded, const at::Tensor& shard, Listing listing) {
  auto* const impl = unsharded.unsafeGetTensorImpl();
  std::unique_ptr<UnshardedMeta> meta(new UnshardedMeta(shard, listing == Listing::ByName));
  if (auto* before = torch::autograd::impl::get_autograd_meta(unsharded)) {
    if (before->cpp_hooks_list_) meta->cpp_hooks_list_ = before->cpp_hooks_list_;
    if (before->post_acc_grad_hooks_) torch::autograd::impl::set_post_acc_grad_hooks(shard, std::move(before->post_acc_grad_hooks_));
    meta->name_ = before->name_;
    if (const auto* known = dynamic_cast<WeightMeta*>(before)) {
      meta->instead = known->instead;
      meta->form = known->form;
    }
  }
  impl->set_autograd_meta(std::move(meta));
  impl->set_version_counter(c10::VariableVersion(unsharded._version()));  // a former view shared the counter of its base
}

bool UnshardedMeta::agree() const {
  auto& shard = *torch::autograd::impl::materialize_autograd_meta(shard_);
  if (requires_grad_ != trains_ && !has_own_shard_) {
    const_cast<UnshardedMeta*>(this)->requires_grad_ = trains_;
    throw UsageError(
        "one parameter of a unit that is listed flat can't be frozen or thawed by itself; give tessera::set_requires_grad the module that "
        "was sharded, or shard with tessera::Listing::ByName");
  }
  if (requires_grad_ != trains_) {
    shard.requires_grad_ = trains_ = requires_grad_;
  } else if (shard.requires_grad_ != trains_) {
    const_cast<UnshardedMeta*>(this)->requires_grad_ = trains_ = shard.requires_grad_;
  }
  return trains_;
}

ShardedMeta::ShardedMeta(const at::Tensor& unsharded) : unsharded_(unsharded) {}

void ShardedMeta::replace(const at::Tensor& shard, const at::Tensor& unsharded) {
  std::unique_ptr<ShardedMeta> meta(new ShardedMeta(unsharded));
  if (auto* before = torch::autograd::impl::get_autograd_meta(shard)) {
    meta->requires_grad_ = before->requires_grad_;
    meta->post_acc_grad_hooks_ = std::move(before->post_acc_grad_hooks_);
  }
  shard.unsafeGetTensorImpl()->set_autograd_meta(std::move(meta));
}

bool ShardedMeta::requires_grad() const {
  const auto unsharded = unsharded_.lock();
  if (unsharded.defined()) unsharded_meta(unsharded)->agree();
  return requires_grad_;
}

const at::Tensor& UnshardedMeta::grad() const {
  if (whole_gradient) return *whole_gradient;
  refuse_gradient(shard_);
}

at::Tensor& UnshardedMeta::mutable_grad() {
  if (whole_gradient) return *whole_gradient;
  // In backward the caller is retain_grad(), which would write this rank's unsharded gradient into the shard's gradient.
  if (torch::autograd::get_current_graph_task_id() != -1) refuse_gradient(shard_);
  return shard_.mutable_grad();
}

at::Tensor UnshardedMeta::run_hooks(at::Tensor gradient) const {
  if (whole_gradient)
    throw UsageError(
        "backward inside full_params with WithGradients::Yes would be lost when full_params writes its gradients back; run it before");
  for (const auto& hook : *cpp_hooks_list_) {
    if (!hook) continue;  // the hook was removed
    at::Tensor result(hook(gradient));
    if (!result.defined()) continue;
    if (result.sizes() != gradient.sizes()) throw UsageError("a hook on a parameter returned a gradient of another shape");
    gradient = std::move(result);
  }
  return gradient;
}

UnshardedMeta* unsharded_meta(const at::Tensor& tensor) {
  auto* const meta = tensor.unsafeGetTensorImpl()->autograd_meta();
  return meta != nullptr && typeid(*meta) == typeid(UnshardedMeta) ? static_cast<UnshardedMeta*>(meta) : nullptr;
}

bool trains(const Unit::Parameter& parameter) {
  const auto unsharded = parameter.unsharded.lock();
  return unsharded.defined() && unsharded_meta(unsharded)->requires_grad();
}

bool is_trained(const Unit& unit) {
  return std::ranges::any_of(parameters_of(unit), trains);
}

namespace {

/// Attached to weight.t(), which libtorch makes for one operator.
struct Transposed final : c10::BackendMeta {
  explicit Transposed(const at::Tensor& weight) : weight(weight) {}

  const at::Tensor weight;
};

/// The record of a weight whose operators are replaced, or that is held in another form; else null.
const WeightMeta* special(const at::Tensor& weight) {
  const auto* const meta = weight_meta(weight);
  return meta != nullptr && (meta->instead || meta->held.defined()) ? meta : nullptr;
}

/// The weight whose weight.t() this view is; undefined for any other tensor.
at::Tensor transposed(const at::Tensor& view) {
  const auto kept = view.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  const auto* const known = dynamic_cast<const Transposed*>(kept.get());
  return known == nullptr ? at::Tensor() : known->weight;
}

}  // namespace

bool& runs_plainly() {
  static thread_local bool plainly = false;
  return plainly;
}

bool has_stand_in(const at::Tensor& weight) {
  return special(weight) != nullptr;
}

std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments) {
  if (const auto* const meta = special(weight)) {
    const auto instead = meta->instead;  // a copy, because the call may replace it
    if (instead && !runs_plainly()) {
      if (auto result = (*instead)(name, arguments)) return result;
    }
    if (!meta->held.defined() || !meta->form->instead) return std::nullopt;
    (void)meta->requires_grad();  // throws if the program has set requires_grad
    return meta->form->instead(name, arguments, meta->held);
  }
  const auto whole = transposed(weight);
  if (!whole.defined()) return std::nullopt;
  const bool has_bias = name == "aten::addmm";
  // In linear(x, weight.t()), weight.t() is not applied as a layer applies its weight.
  if (!has_bias && name != "aten::matmul" && name != "aten::mm") return std::nullopt;
  const auto beta = has_bias ? arguments[3].toScalar() : c10::Scalar(1), alpha = has_bias ? arguments[4].toScalar() : c10::Scalar(1);
  const bool is_linear = beta.equal(1) && alpha.equal(1);
  const c10::IValue linear[] = {arguments[has_bias ? 1 : 0], whole, has_bias && is_linear ? arguments[0] : c10::IValue()};
  auto result = replaced_operator(whole, "aten::linear", linear);
  return result && !is_linear ? arguments[0].toTensor() * beta + *result * alpha : result;
}

void note_transposed(const at::Tensor& weight, const at::Tensor& view) {
  if (special(weight) != nullptr) view.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Transposed>(weight));
}

bool is_only_replaced(const at::Tensor& weight) {
  const auto* const meta = special(weight);
  return meta != nullptr && !meta->held.defined() && unsharded_meta(weight) == nullptr;
}

void keep_replaced(const at::Tensor& values) {
  if (!is_paged(values)) values.unsafeGetTensorImpl()->shallow_copy_from(paged_alias(values).getIntrusivePtr());
}

at::Tensor decoded(const at::Tensor& weight) {
  if (const auto* const meta = special(weight)) return meta->held.defined() ? meta->form->decode(meta->held, meta->form->dtype) : at::Tensor();
  const auto whole = transposed(weight);
  const auto values = whole.defined() ? decoded(whole) : at::Tensor();
  return values.defined() ? values.t() : values;
}

}  // namespace tessera
