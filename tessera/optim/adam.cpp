#include "tessera/optim/adam.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "tessera/base/error.h"
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

AdamOptions as_adam(const AdamWOptions& options) {
  return {.lr = options.lr, .beta1 = options.beta1, .beta2 = options.beta2, .eps = options.eps, .weight_decay = options.weight_decay};
}

}  // namespace

Adam::Adam(std::vector<at::Tensor> parameters, AdamOptions options)
    : Adam(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options) : Adam(std::move(groups), options, WeightDecay::L2) {}

Adam::Adam(std::vector<ParameterGroup> groups, AdamOptions options, WeightDecay decay)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay}, {{.name = "exp_avg"}, {.name = "exp_avg_sq"}},
                fmt::format("{} with betas {} and {}, eps {}", decay == WeightDecay::L2 ? "Adam" : "AdamW", options.beta1, options.beta2,
                            options.eps)),
      options_(options),
      decay_(decay) {
  expect_option("beta1", options.beta1, 1);
  expect_option("beta2", options.beta2, 1);
  expect_option("eps", options.eps);
}

/// A tensor with the number of the step, which nearly all items of a step have in common.
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
  // The kernels of GPUs scale a gradient on the way, and leave it scaled.
  const bool scales = item.parameter.is_cuda() && item.factor.defined() && item.parameter.scalar_type() != at::kDouble;
  std::optional<at::Tensor> divisor;
  if (scales) divisor = item.factor.to(item.parameter.device(), at::kFloat).reciprocal();
  const auto gradient = scales ? item.gradient : scaled(item.gradient, item.factor);
  // They also compare shapes.
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

SmallAdamW::SmallAdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : SmallAdamW(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

SmallAdamW::SmallAdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay},
                {{.name = "exp_avg", .dtype = at::kChar},
                 {.name = "exp_avg_sq", .dtype = at::kByte},
                 {.name = "exp_avg_scales", .dtype = at::kFloat, .block = kBlock},
                 {.name = "exp_avg_sq_scales", .dtype = at::kFloat, .block = kBlock}},
                fmt::format("SmallAdamW with betas {} and {}, eps {}", options.beta1, options.beta2, options.eps)),
      options_(options) {
  expect_option("beta1", options.beta1, 1);
  expect_option("beta2", options.beta2, 1);
  expect_option("eps", options.eps);
}

void SmallAdamW::apply(const Settings& settings, int64_t step, const Item& item) {
  if (!has_loops(item.parameter, item.gradient, {})) {
    throw UsageError("SmallAdamW works on dense float32 parameters in host memory; use AdamW for others");
  }
  const auto rule = rule_of(settings.lr, settings.weight_decay, as_adam(options_), step, true, item.factor);
  const auto all = update_range(item.parameter, item.gradient, {}, item.cast_copy);
  const auto blocks = (all.count + kBlock - 1) / kBlock;
  at::parallel_for(0, blocks, 256, [&](int64_t begin, int64_t end) {
    const auto first = begin * kBlock;
    update(rule, part_of(all, first, std::min(end * kBlock, all.count) - first),
           {.first = item.state[0].data_ptr<int8_t>() + first,
            .second = item.state[1].data_ptr<uint8_t>() + first,
            .first_scales = item.state[2].data_ptr<float>() + begin,
            .second_scales = item.state[3].data_ptr<float>() + begin});
  });
}

}  // namespace tessera::optim
