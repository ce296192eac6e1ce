#include "tessera/optim/adam.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "tessera/base/dynamic_code.h"
#include "tessera/base/error.h"
#include "tessera/comm/simulation.h"
#include "tessera/optim/update_range.h"

namespace tessera::optim {
namespace {

AdamRule rule_of(double lr, double decay, const AdamOptions& options, int64_t step, bool direct_decay, const at::Tensor& factor) {
  const auto n = static_cast<double>(step);
  return {.common = {.factor = value_of(factor),
                     .l2 = direct_decay ? 0 : static_cast<float>(decay),
                     .keep = direct_decay ? static_cast<float>(1 - lr * decay) : 1},
          .step = static_cast<float>(lr / (1 - std::pow(options.beta1, n))),
          .first = Decay(options.beta1),
          .second = Decay(options.beta2),
          .correction = static_cast<float>(std::sqrt(1 - std::pow(options.beta2, n))),
          .eps = static_cast<float>(options.eps)};
}

constexpr int64_t kBlock = DynamicCode::kBlock, kBlocksAtOnce = 64;

/// The values of a moment in a range of blocks. The constructor decodes them, and store() encodes them again.
struct Moment {
  Moment(const DynamicCode& code, const at::Tensor& codes, const at::Tensor& scales, int64_t begin, int64_t size)
      : values(at::empty({size}, at::kFloat)),
        code_(code),
        codes_(codes.data_ptr<uint8_t>() + begin),
        scales_(scales.data_ptr<float>() + begin / kBlock) {
    each_block([&](int64_t block, std::span<float> floats, uint8_t* bytes) { code_.decode(bytes, scales_[block], floats); });
  }
  void store() const {
    each_block([&](int64_t block, std::span<float> floats, uint8_t* bytes) { scales_[block] = code_.encode(floats, bytes); });
  }

  const at::Tensor values;

 private:
  template <class Act>
  void each_block(const Act& act) const {
    const std::span all(values.data_ptr<float>(), static_cast<size_t>(values.numel()));
    for (int64_t begin = 0; begin < values.numel(); begin += kBlock)
      act(begin / kBlock, all.subspan(static_cast<size_t>(begin), static_cast<size_t>(std::min(kBlock, values.numel() - begin))),
          codes_ + begin);
  }

  const DynamicCode& code_;
  uint8_t* const codes_;
  float* const scales_;
};

AdamOptions as_adam(const AdamWOptions& options) {
  return {.lr = options.lr, .beta1 = options.beta1, .beta2 = options.beta2, .eps = options.eps, .weight_decay = options.weight_decay};
}

}  // namespace

Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions options)
    : Adam(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options) : Adam(std::move(groups), options, WeightDecay::L2) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options, WeightDecay decay, std::vector<StateKind> in_blocks)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay}, {{.name = "exp_avg"}, {.name = "exp_avg_sq"}},
                fmt::format("{}{} with betas {} and {}, eps {}", decay == WeightDecay::L2 ? "Adam" : "AdamW",
                            in_blocks.empty() ? "" : "8bit", options.beta1, options.beta2, options.eps),
                std::move(in_blocks)),
      options_(options),
      decay_(decay) {
  expect_option("beta1", options.beta1, 1);
  expect_option("beta2", options.beta2, 1);
  expect_option("eps", options.eps);
}

/// Returns a tensor with the number of the step, and keeps it for the other items of the step, which nearly all have the same number.
const at::Tensor& Adam::number_of_step(int64_t step, at::Device device) {
  if (!step_.defined() || step_value_ != step || step_.device() != device) {
    step_ = at::full({}, step, at::TensorOptions(device).dtype(at::kFloat));
    step_value_ = step;
  }
  return step_;
}

void Adam::apply(const Settings& settings, int64_t step, const Item& item) {
  const bool direct = decay_ == WeightDecay::Decoupled;
  if (has_loops(item.parameter, item.gradient, item.state)) {
    return update_in_parallel(rule_of(settings.lr, settings.weight_decay, options_, step, direct, item.factor),
                              update_range(item.parameter, item.gradient, item.state, item.cast_copy));
  }
  const bool has_kernel = item.parameter.is_cuda() || (item.parameter.is_cpu() && item.parameter.scalar_type() != at::kDouble);
  if (!has_kernel) return apply_by_operators(settings, step, item);
  if (item.parameter.numel() == 0) return;
  // The fused kernels of GPUs can scale the gradient themselves, and do it in place.
  const bool scales = item.parameter.is_cuda() && item.factor.defined() && item.parameter.scalar_type() != at::kDouble;
  std::optional<at::Tensor> divisor;
  if (scales) divisor = item.factor.to(item.parameter.device(), at::kFloat).reciprocal();
  const auto gradient = scales ? item.gradient : scaled(item.gradient, item.factor);
  // The fused kernels require equal shapes.
  const auto flat = [](const at::Tensor& tensor) { return tensor.is_contiguous() ? tensor.view({tensor.numel()}) : tensor; };
  const std::vector<at::Tensor> parameters = {flat(item.parameter)}, gradients = {flat(gradient)}, first = {flat(item.state[0])},
                                second = {flat(item.state[1])}, steps = {number_of_step(step, item.parameter.device())};
  const auto fused = [&](const auto& kernel) {
    kernel(parameters, gradients, first, second, std::vector<at::Tensor>(), steps, settings.lr, options_.beta1, options_.beta2,
           settings.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false, divisor, std::nullopt);
  };
  if (direct) {
    fused([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  } else {
    fused([](auto&&... arguments) { at::_fused_adam_(arguments...); });
  }
}

void Adam::apply_by_operators(const Settings& settings, int64_t step, const Item& item) const {
  const auto n = static_cast<double>(step);
  const auto &parameter = item.parameter, &first = item.state[0], &second = item.state[1];
  auto gradient = scaled(item.gradient, item.factor);
  if (decay_ == WeightDecay::Decoupled) {
    parameter.mul_(1 - settings.lr * settings.weight_decay);
  } else if (settings.weight_decay != 0) {
    gradient = gradient.add(parameter, settings.weight_decay);
  }
  first.lerp_(gradient, 1 - options_.beta1);
  second.mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
  const auto root = second.sqrt().div_(std::sqrt(1 - std::pow(options_.beta2, n))).add_(options_.eps);
  parameter.addcdiv_(first, root, -settings.lr / (1 - std::pow(options_.beta1, n)));
}

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

AdamW::AdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : Adam(std::move(groups), as_adam(options), WeightDecay::Decoupled) {}

AdamW8bit::AdamW8bit(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW8bit(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

AdamW8bit::AdamW8bit(std::vector<ParameterGroup> groups, AdamWOptions options)
    : Adam(std::move(groups), as_adam(options), WeightDecay::Decoupled,
           {{.name = "exp_avg", .dtype = at::kByte},
            {.name = "exp_avg_sq", .dtype = at::kByte},
            {.name = "exp_avg_scales", .dtype = at::kFloat, .block = kBlock},
            {.name = "exp_avg_sq_scales", .dtype = at::kFloat, .block = kBlock}}) {
  for (const auto& parameter : this->parameters()) {
    if (!parameter.is_cpu() && !parameter.is_meta())
      throw UsageError("AdamW8bit works in host memory only, but a parameter is on {}; use AdamW", parameter.device().str());
  }
}

void AdamW8bit::apply(const Settings& settings, int64_t step, const Item& item) {
  if (item.state.size() == 2) return Adam::apply(settings, step, item);
  item.parameter.unsafeGetTensorImpl()->bump_version();  // the writes below bypass autograd
  const auto count = item.parameter.numel();
  const auto n = static_cast<double>(step);
  const auto of_first = 1 - std::pow(options().beta1, n), of_second = std::sqrt(1 - std::pow(options().beta2, n));
  const auto factor = value_of(item.factor);
  if (auto* const simulation = Simulation::current()) return simulation->update(static_cast<uint64_t>(count) * 16);
  at::parallel_for(0, (count + kBlock - 1) / kBlock, kBlocksAtOnce, [&](int64_t first_block, int64_t end_block) {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (auto begin = first_block * kBlock; begin < std::min(end_block * kBlock, count); begin += kBlocksAtOnce * kBlock) {
      const auto size = std::min({kBlocksAtOnce * kBlock, count - begin, end_block * kBlock - begin});
      const auto part = [&](const at::Tensor& tensor) {
        return at::from_blob(static_cast<std::byte*>(tensor.data_ptr()) + begin * tensor.element_size(), {size},
                             at::TensorOptions().dtype(tensor.scalar_type()));
      };
      // These are the operators of bitsandbytes, in the same order, so that results are the same to the bit.
      const auto parameter = part(item.parameter), wide = parameter.to(at::kFloat);
      auto gradient = part(item.gradient).to(at::kFloat);
      if (item.factor.defined()) gradient = gradient * factor;
      const Moment first(DynamicCode::of_signed(), item.state[0], item.state[2], begin, size),
          second(DynamicCode::of_unsigned(), item.state[1], item.state[3], begin, size);
      first.values.mul_(options().beta1).add_(gradient, 1 - options().beta1);
      second.values.mul_(options().beta2).addcmul_(gradient, gradient, 1 - options().beta2);
      const auto root = (second.values.sqrt() / of_second).add_(options().eps);
      if (settings.weight_decay > 0) wide.mul_(1 - settings.lr * settings.weight_decay);
      wide.addcdiv_(first.values, root, -settings.lr / of_first);
      if (!wide.is_same(parameter)) parameter.copy_(wide);
      if (item.cast_copy.defined()) part(item.cast_copy).copy_(wide);
      first.store();
      second.store();
    }
  });
}

}  // namespace tessera::optim
