#include "tessera/nn/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/wide_products.h"
#include "tessera/nn/linear.h"
#include "tessera/shard/weight_forms.h"

namespace tessera::nn {
namespace {

/// The number of rows whose scores take 32 MB, or an eighth of the weight's gradient if that is more.
int64_t default_rows(const at::Tensor& weight, bool has_gradient) {
  const auto small = std::max<int64_t>(1, (int64_t{32} << 20) / (std::max<int64_t>(1, weight.size(0)) * 4));
  return has_gradient ? std::max(small, at::divup(weight.size(1), 8)) : small;
}

struct Scored {
  at::Tensor losses;               // of each row; 0 for rows that do not count
  at::Tensor grad_x, grad_weight;  // undefined unless asked for
};

at::Tensor losses_of(const at::Tensor& scores, const at::Tensor& log_sum, const at::Tensor& target, double z_loss) {
  return log_sum - scores.gather(1, target) + z_loss * log_sum.square();
}

/// Computes the losses by autograd, with all scores in memory at once: for a weight whose operator is replaced, such as one with an adapter.
at::Tensor losses_of_scores(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets, const LinearCrossEntropy& options) {
  const auto product = at::linear(x, weight);
  const auto scores = softcapped(product.to(at::promoteTypes(product.scalar_type(), at::kFloat)), options.softcap);
  const auto counts = (targets != options.ignore_index).unsqueeze(1);
  const auto target = at::where(counts, targets.unsqueeze(1), 0);
  return (losses_of(scores, scores.logsumexp(1, /*keepdim=*/true), target, options.z_loss) * counts).squeeze(1);
}

/// Computes the losses of all rows, and in the same pass the gradients of their sum, in which `factors`, {rows}, multiply them if given.
Scored go_through(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets, const at::Tensor& factors,
                  const LinearCrossEntropy& options, bool for_x, bool for_weight) {
  const auto rows = x.size(0);
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto at_once = options.rows_at_once > 0 ? options.rows_at_once : default_rows(weight, for_weight);
  const auto counts = targets != options.ignore_index;
  const auto multiplied = x.is_cpu() && multiplies_slowly(x.scalar_type()) ? at::kFloat : x.scalar_type();
  const auto matrix = weight.to(multiplied);
  Scored result{.losses = at::empty({rows}, x.options().dtype(dtype)), .grad_x = {}, .grad_weight = {}};
  if (for_x) result.grad_x = at::empty_like(x);
  // Runs once even without rows: the other ranks wait for this rank's use of the weight, and for its gradient.
  for (int64_t begin = 0; begin < rows || begin == 0; begin += at_once) {
    const auto size = std::min(at_once, rows - begin);
    const auto part = x.narrow(0, begin, size).to(multiplied), counted = counts.narrow(0, begin, size).unsqueeze(1).to(dtype);
    const auto target = at::where(counts, targets, 0).narrow(0, begin, size).unsqueeze(1);
    auto scores = softcapped(at::linear(part, matrix).to(dtype), options.softcap);
    const auto slope = options.softcap > 0 ? 1 - (scores / options.softcap).square() : at::Tensor();  // of the cap
    const auto log_sum = scores.logsumexp(1, /*keepdim=*/true);
    result.losses.narrow(0, begin, size).copy_((losses_of(scores, log_sum, target, options.z_loss) * counted).squeeze(1));
    if (!for_x && !for_weight) continue;
    const auto factor = factors.defined() ? counted * factors.narrow(0, begin, size).unsqueeze(1) : counted;
    // d/ds of log_sum - s[target] + z * log_sum^2, where the derivative of log_sum is the softmax.
    scores.sub_(log_sum).exp_();
    if (options.z_loss != 0) scores.mul_(1 + 2 * options.z_loss * log_sum);
    scores.scatter_add_(1, target, at::full({}, -1, scores.options()).expand(target.sizes())).mul_(factor);
    if (slope.defined()) scores.mul_(slope);
    const auto grad = scores.to(multiplied);
    if (for_x) result.grad_x.narrow(0, begin, size).copy_(grad.matmul(matrix));
    if (!for_weight) continue;
    if (!result.grad_weight.defined()) {
      result.grad_weight = grad.t().matmul(part).to(dtype);
    } else if (grad.scalar_type() == dtype) {
      result.grad_weight.addmm_(grad.t(), part);
    } else {
      result.grad_weight += grad.t().matmul(part);
    }
  }
  return result;
}

at::Tensor divisor_of(const at::Tensor& targets, const LinearCrossEntropy& options) {
  return options.divisor.defined() ? options.divisor : (targets != options.ignore_index).sum().clamp_min(1);
}

void refuse_second_derivatives(std::string_view why) {
  if (!c10::GradMode::is_enabled()) return;
  throw UsageError(
      "{}, so they can't be differentiated again; call backward without create_graph, or compute cross_entropy of linear(x, weight)", why);
}

struct Loss : torch::autograd::Function<Loss> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& targets, const LinearCrossEntropy& options, bool for_x, bool for_weight) {
    const auto scored = go_through(x, weight, targets, {}, options, for_x, for_weight);
    const auto share = 1 / divisor_of(targets, options).to(scored.losses.scalar_type());
    context->save_for_backward({scored.grad_x, scored.grad_weight, share});
    context->saved_data["dtype"] = weight.scalar_type();
    return scored.losses.sum() * share;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    refuse_second_derivatives("linear_cross_entropy makes its gradients in forward");
    const auto saved = context->get_saved_variables();
    const auto factor = grads[0] * saved[2];
    // The gradients are as large as the weight, so they are scaled in place unless backward may run again.
    const bool may_change = !torch::autograd::get_current_graph_task_keep_graph();
    const auto scaled = [&](at::Tensor gradient) {
      if (!gradient.defined()) return gradient;
      return may_change ? gradient.mul_(factor) : gradient * factor;
    };
    auto of_weight = scaled(saved[1]);
    if (of_weight.defined()) of_weight = of_weight.to(context->saved_data["dtype"].toScalarType());
    return {scaled(saved[0]), of_weight, {}, {}, {}, {}};
  }
};

/// The losses of the rows, whose factors in the gradient are known only in backward.
struct Losses : torch::autograd::Function<Losses> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& targets, const LinearCrossEntropy& options) {
    context->save_for_backward({x, weight, targets});
    context->saved_data["ignore_index"] = options.ignore_index;
    context->saved_data["z_loss"] = options.z_loss;
    context->saved_data["rows_at_once"] = options.rows_at_once;
    context->saved_data["softcap"] = options.softcap;
    return go_through(x, weight, targets, {}, options, /*for_x=*/false, /*for_weight=*/false).losses;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    refuse_second_derivatives("linear_cross_entropies makes its gradients itself");
    const auto saved = context->get_saved_variables();
    const LinearCrossEntropy options{.ignore_index = context->saved_data["ignore_index"].toInt(),
                                     .softcap = context->saved_data["softcap"].toDouble(),
                                     .z_loss = context->saved_data["z_loss"].toDouble(),
                                     .rows_at_once = context->saved_data["rows_at_once"].toInt()};
    const auto scored =
        go_through(saved[0], saved[1], saved[2], grads[0], options, context->needs_input_grad(0), context->needs_input_grad(1));
    return {scored.grad_x, scored.grad_weight.defined() ? scored.grad_weight.to(saved[1].scalar_type()) : at::Tensor(), {}, {}};
  }
};

void expect_fit(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets) {
  if (x.dim() >= 1 && x.size(-1) == weight.size(1) && x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)) == targets.sizes()) return;
  throw UsageError("linear_cross_entropy: values of the sizes [{}], a weight of [{}] and targets of [{}] don't belong together",
                   joined(x.sizes()), joined(weight.sizes()), joined(targets.sizes()));
}

}  // namespace

at::Tensor softcapped(const at::Tensor& scores, double cap) {
  return cap > 0 ? (scores / cap).tanh() * cap : scores;
}

at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                const LinearCrossEntropy& options) {
  expect_fit(x, weight, targets);
  if (c10::GradMode::is_enabled() && options.divisor.defined() && options.divisor.requires_grad())
    throw UsageError("linear_cross_entropy computes no gradient for its divisor; detach the divisor, or divide the loss yourself");
  const auto rows = rows_of(x), of_rows = targets.reshape(-1);
  if (has_stand_in(weight)) {
    const auto losses = losses_of_scores(rows, weight, of_rows, options);
    return losses.sum() / divisor_of(of_rows, options).to(losses.scalar_type());
  }
  const bool grad = at::GradMode::is_enabled();
  return Loss::apply(rows, weight, of_rows, options, grad && x.requires_grad(), grad && weight.requires_grad());
}

at::Tensor linear_cross_entropies(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                  const LinearCrossEntropy& options) {
  expect_fit(x, weight, targets);
  const auto rows = rows_of(x), of_rows = targets.reshape(-1);
  const auto losses = has_stand_in(weight) ? losses_of_scores(rows, weight, of_rows, options) : Losses::apply(rows, weight, of_rows, options);
  return losses.view(targets.sizes());
}

}  // namespace tessera::nn
