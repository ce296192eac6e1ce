// Values that one rank would compute of its shards and take for those of the whole parameters: refused, in whatever form. What acts on each
// value by itself stays allowed.
#include <sstream>

#include "idiom.h"
#include "tessera/shard/local.h"
#include "tessera/shard/norms.h"

namespace tessera::idioms::local_values {
namespace {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

/// After a backward pass, something over the parameters as an optimizer sees them.
using Look = std::function<void(const Tensors& parameters)>;
void look(Run& run, const Look& at_them) {
  const auto model = nested(run);
  run.backward(loss_of(run, *model, 0));
  at_them(run.parameters(*model));
}

Idiom alone(const std::string& what, const Look& at_them, const std::string& remark = {}) {
  return {.what = what,
          .act = [at_them](Run& run) {
            look(run, [&](const Tensors& parameters) {
              const torch::NoGradGuard no_grad;
              at_them(parameters);
            });
          },
          .refused = "would be the result of this rank alone",
          .remark = remark};
}

/// Trains, with something after each backward pass that acts on every value by itself.
Idiom allowed(const std::string& what, const std::function<void(const at::Tensor& parameter)>& change) {
  return {.what = what, .act = [change](Run& run) {
            const auto model = nested(run);
            const auto optimizer = run.sgd(*model);
            for (int step = 0; step < 4; step++) {
              const auto loss = loss_of(run, *model, step);
              run.backward(loss);
              {
                const torch::NoGradGuard no_grad;
                for (const auto& parameter : run.parameters(*model)) change(parameter);
              }
              run.record_gradients(run.parameters(*model));
              optimizer.step();
              optimizer.zero_grad();
              run.record(loss);
            }
            run.record_parameters(*model);
          }};
}

void use(const at::Tensor& value) {
  (void)value.numel();
}

}  // namespace

Chapter chapter() {
  return {
      .title = "Values of one rank",
      .idioms = {
      alone("`torch::nn::utils::clip_grad_norm_`", [](auto& p) { nn::utils::clip_grad_norm_(p, 1.0); }, "`tessera::clip_grad_norm`"),
      alone("the norm of a gradient", [](auto& p) { use(p[0].grad().norm()); }, "`tessera::grad_norm`"),
      alone("a norm in two operators: `(g * g).sum()`", [](auto& p) { use((p[0].grad() * p[0].grad()).sum()); }),
      alone("a norm in three: `g.pow(2)`, then `mean()`, then `sqrt()`", [](auto& p) { use(p[1].grad().pow(2).mean().sqrt()); }),
      alone("the norm of a sum: `(g + 0.1 * w).norm()`", [](auto& p) { use((p[0].grad() + 0.1 * p[0]).norm()); }),
      alone("norms of all gradients by `_foreach_norm`", [](auto& p) { use(at::_foreach_norm({p[0].grad(), p[2].grad()})[0]); }),
      alone("the largest gradient: `g.abs().max()`", [](auto& p) { use(p[0].grad().abs().max()); }),
      alone("one vector of all gradients, by `cat` of `view({-1})`",
            [](auto& p) { use(torch::cat({p[0].grad().view({-1}), p[1].grad().view({-1})})); }),
      alone("`torch::nn::utils::parameters_to_vector`", [](auto& p) { use(nn::utils::parameters_to_vector(p)); }),
      alone("`stack` of what was computed from each gradient", [](auto& p) { use(torch::stack({p[1].grad() * 2, p[1] + 1})); }),
      alone("a dot product of weights and gradients", [](auto& p) { use(p[1].dot(p[1].grad())); }),
      alone("`inner` of a gradient with itself", [](auto& p) { use(torch::inner(p[1].grad(), p[1].grad())); }),
      alone("the distance of weights from where they began: `dist`",
            [](auto& p) { use(torch::dist(p[0], p[0].detach().clone() * 0.5)); }),
      alone("`mse_loss` between weights and a mean of them",
            [](auto& p) { use(torch::mse_loss(p[0], p[0].detach().clone().mul(0.9))); }),
      alone("the cosine of two gradients", [](auto& p) { use(torch::cosine_similarity(p[1].grad(), p[1], 0)); }),
      alone("are all gradients finite: `isfinite().all()`", [](auto& p) { use(p[0].grad().isfinite().all()); },
            "look at the loss, or at `tessera::grad_norm`"),
      alone("is any gradient NaN: `isnan().any().item()`", [](auto& p) { (void)p[0].grad().isnan().any().template item<bool>(); }),
      alone("how many weights are small: `count_nonzero` of a comparison", [](auto& p) { use((p[0].abs() < 0.1).count_nonzero()); }),
      alone("a threshold for pruning by `kthvalue`", [](auto& p) { use(std::get<0>(p[0].abs().view({-1}).kthvalue(1))); }),
      alone("the largest weights by `topk`", [](auto& p) { use(std::get<0>(p[0].abs().view({-1}).topk(1))); }),
      alone("the median of the gradients", [](auto& p) { use(p[0].grad().median()); }),
      alone("sorted weights", [](auto& p) { use(std::get<0>(p[1].sort())); }),
      alone("a cumulative sum of weights", [](auto& p) { use(p[1].cumsum(0)); }),
      alone("a softmax over weights", [](auto& p) { use(p[1].softmax(0)); }),
      alone("mean and deviation of weights for a log", [](auto& p) { use(std::get<0>(torch::std_mean(p[0]))); }),
      alone("a histogram of weights by `histc`", [](auto& p) { use(p[0].histc(10, -1, 1)); }),
      alone("gradients centered: `g - g.mean(1, true)`", [](auto& p) { use(p[0].grad() - p[0].grad().mean(1, true)); }),
      alone("orthogonal gradients: `g.mm(g.t())`", [](auto& p) { use(p[0].grad().mm(p[0].grad().t())); }),
      alone("power iteration over a weight: `w.mv(u)`", [](auto& p) { use(p[0].mv(values({6}))); }),
      alone("have the weights changed: `torch::equal`", [](auto& p) { (void)torch::equal(p[0], p[0].detach().clone()); }),
      alone("are weights close to others: `torch::allclose`", [](auto& p) { (void)torch::allclose(p[0], p[0].detach() + 1); }),
      {.what = "one value of a weight: `w.view({-1})[0].item<float>()`", .act = [](Run& run) {
        look(run, [](const Tensors& p) { (void)p[0].view({-1})[0].item<float>(); });
       }, .refused = "picks values by their places"},
      {.what = "a penalty in the loss over `parameters()`: `p.pow(2).sum()`", .act = [](Run& run) {
        look(run, [](const Tensors& p) {
          auto penalty = torch::zeros({});
          for (const auto& one : p) penalty = penalty + one.pow(2).sum();
        });
       }, .refused = "would be the result of this rank alone", .remark = "over the modules' own members it is right"},
      {.what = "a penalty in the loss over `parameters()`: `p.abs().mean()`", .act = [](Run& run) {
        look(run, [](const Tensors& p) { use(p[0].abs().mean() + p[2].abs().mean()); });
       }, .refused = "would be the result of this rank alone"},
      {.what = "a layer computed with what `parameters()` lists: `torch::linear(x, p)`", .act = [](Run& run) {
        look(run, [](const Tensors& p) { use(torch::linear(values({2, 6}), p[0])); });
       }, .refused = "would be the result of this rank alone"},
      {.what = "the norm of a momentum that was computed from gradients by hand", .act = [](Run& run) {
        look(run, [](const Tensors& p) {
          const auto momentum = 0.9 * p[0].grad().detach().clone() + 0.1 * p[0].grad();
          use(momentum.norm());
        });
       }, .refused = "would be the result of this rank alone"},
      allowed("gradients changed by elementwise operators in place", [](auto& p) { p.grad().mul_(0.5).add_(p.detach() * 0.01); }),
      allowed("gradients replaced by what elementwise operators made of them",
              [](auto& p) { p.mutable_grad() = p.grad().clamp(-0.1, 0.1) * 2 - p.grad().sign() * 0.01; }),
      allowed("NaN in gradients replaced by `nan_to_num_`", [](auto& p) { p.grad().div_(p.grad() * 1).nan_to_num_(0.5); }),
      allowed("small gradients set to zero by a comparison and `masked_fill_`",
              [](auto& p) { p.grad().masked_fill_(p.grad().abs() < 0.01, 0); }),
      allowed("weights pruned by a fixed threshold", [](auto& p) { p.mul_((p.abs() > 0.15).to(p.scalar_type())); }),
      allowed("weights rounded to a grid through a flat view", [](auto& p) { p.detach().view({-1}).mul_(64).round_().div_(64); }),
      allowed("what has `dim() >= 2` treated otherwise than what has not", [](auto& p) { p.grad().mul_(p.dim() >= 2 ? 2 : 0.5); }),
      {.what = "penalties over the modules' own members", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          auto penalty = model->first->weight.abs().mean() + model->second->bias.norm();
          return loss_of(run, *model, step) + 0.1 * penalty + 0.01 * model->second->weight.pow(2).sum();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "statistics of the modules' own members, for a log", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto loss = [&](int step) {
          const torch::NoGradGuard no_grad;
          run.record(model->first->weight.std());
          run.record(std::get<0>(model->second->weight.abs().view({-1}).topk(3)));
          run.record(model->second->bias[1].item<double>());
          const at::AutoGradMode grad(true);
          return loss_of(run, *model, step);
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "printing a module's own member", .act = [](Run& run) {
        const auto model = nested(run);
        const torch::NoGradGuard no_grad;
        std::ostringstream text;
        text << model->first->weight << model->second->bias;
        double sum = 0;
        for (const char c : text.str()) sum = 0.5 * sum + c;
        run.record(sum);
       }, .remark = "all ranks have to print"},
      {.what = "`tessera::to_local`, a sum over this rank's values, and `all_reduce`", .act = [](Run& run) {
        const auto model = nested(run);
        for (int step = 0; step < 3; step++) {
          run.backward(loss_of(run, *model, step));
          const torch::NoGradGuard no_grad;
          auto squares = torch::zeros({}, at::kDouble);
          for (const auto& p : run.parameters(*model)) {
            const auto own = run.sharded() ? to_local(p.grad()) : p.grad();
            squares += own.to(at::kDouble).pow(2).sum();
          }
          if (run.sharded()) run.world().all_reduce(squares).wait();
          run.record(squares.sqrt());
          run.record(grad_norm(run.parameters(*model)).to(at::kDouble));
        }
       }, .within = 1e-5, .because = "the sum is added in another order"},
      }};
}

}  // namespace tessera::idioms::local_values
