// Activation checkpointing by a Function as programs write it, which runs a forward and a backward pass inside of backward.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <utility>

namespace tessera::testing {

using SegmentFunction = std::function<at::Tensor(const at::Tensor&)>;

struct HeldSegment : torch::CustomClassHolder {
  SegmentFunction run;
};

/// `anchor` requires a gradient, so that there is a node even if x does not.
struct CheckpointByHand : torch::autograd::Function<CheckpointByHand> {
  using Context = torch::autograd::AutogradContext;

  static at::Tensor forward(Context* context, const at::Tensor& x, const at::Tensor& /*anchor*/, const SegmentFunction& run) {
    auto segment = c10::make_intrusive<HeldSegment>();
    segment->run = run;
    context->saved_data["segment"] = c10::IValue::make_capsule(std::move(segment));
    context->saved_data["needs"] = x.requires_grad();
    context->save_for_backward({x});
    return run(x);
  }
  static torch::autograd::variable_list backward(Context* context, const torch::autograd::variable_list& gradients) {
    const bool needs = context->saved_data["needs"].toBool();
    const auto x = context->get_saved_variables()[0].detach().set_requires_grad(needs);
    const auto segment = c10::static_intrusive_pointer_cast<HeldSegment>(context->saved_data["segment"].toCapsule());
    const at::AutoGradMode grad(true);
    segment->run(x).backward(gradients[0]);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

/// Forgets the activations of a segment, and runs it again in backward.
inline at::Tensor checkpoint_by_hand(const SegmentFunction& run, const at::Tensor& x) {
  return CheckpointByHand::apply(x, at::zeros({1}).set_requires_grad(true), run);
}

}  // namespace tessera::testing
