// Units on a part of the ranks, such as experts, and parameters that fully_shard is told to leave alone.
#include <cmath>
#include <limits>

#include "idiom.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/training.h"

namespace tessera::idioms::parts {
namespace {

namespace nn = torch::nn;

/// Each rank has an expert of its own, and a share of the layers around it.
struct Mixture : nn::Module {
  nn::Linear first{nullptr}, expert{nullptr}, last{nullptr};
  explicit Mixture(int rank, const std::string& name) {
    first = register_module("first", nn::Linear(6, 5));
    last = register_module("last", nn::Linear(5, 3));
    fill(*this);
    expert = register_module(name, nn::Linear(5, 5));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : expert->parameters()) parameter.copy_(values(parameter.sizes(), rank));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(expert(torch::tanh(first(x))))); }
};

std::shared_ptr<Mixture> mixture(Run& run, const std::string& name = "expert") {
  auto model = std::make_shared<Mixture>(run.rank(), name);
  if (!run.sharded()) {  // the plain run's backward() averages over all ranks
    run.shard(model->first);
    run.shard(model->last);
    return model;
  }
  std::vector<std::vector<int>> each;
  for (int rank = 0; rank < run.ranks(); rank++) each.push_back({rank});
  fully_shard(model->expert, {.mesh = Mesh::of_groups(run.world(), each), .residence = *run.setting().sharded});
  run.shard(model);
  return model;
}

/// The norm of the gradients of all experts and of what is around them.
double norm_of(const Run& run, Mixture& model) {
  const torch::NoGradGuard no_grad;
  if (run.sharded()) return grad_norm(parameters(model)).item<double>();
  auto experts = torch::zeros({}, at::kDouble);
  double shared = 0;
  for (const auto& parameter : model.expert->parameters()) experts += parameter.grad().to(at::kDouble).pow(2).sum();
  run.world().all_reduce(experts).wait();
  for (const auto& layer : {model.first, model.last}) {
    for (const auto& parameter : layer->parameters()) shared += parameter.grad().to(at::kDouble).pow(2).sum().item<double>();
  }
  return std::sqrt(shared + experts.item<double>());
}

/// Trains, with something between backward and the step.
void train(Run& run, Mixture& model, const std::function<bool(int step)>& may_step) {
  const auto optimizer = run.sgd(model, 0.1);
  for (int step = 0; step < 4; step++) {
    const auto loss = loss_of(run, model, step);
    run.backward(loss);
    if (may_step(step)) {
      optimizer.step();
    } else if (run.sharded()) {
      optimizer.ours() != nullptr ? optimizer.ours()->skip_step() : skip_step(model);
    }
    optimizer.zero_grad();
    run.record(loss);
  }
  run.record_parameters(model);
}

void overflow_on_the_last_rank(const Run& run, Mixture& model) {
  if (run.rank() == run.ranks() - 1) run.parameters(*model.expert).front().mutable_grad().fill_(std::numeric_limits<float>::infinity());
}

/// A model whose first layer is in `.ignored`.
std::shared_ptr<Mlp> with_ignored(Run& run) {
  auto model = std::make_shared<Mlp>();
  run.shard(model, {.mesh = run.world(), .ignored = model->first->parameters()});
  return model;
}

void average(const Run& run, const nn::Module& model) {
  if (run.sharded()) average_gradients(run.parameters(model), run.world());
}

void clip(Run& run, const nn::Module& model) {
  run.record(run.sharded() ? clip_grad_norm(run.parameters(model), 0.05)
                           : torch::full({}, nn::utils::clip_grad_norm_(run.parameters(model), 0.05)));
}

}  // namespace

Chapter chapter() {
  constexpr auto kOrder = "the squares are added in another order";
  constexpr auto kDiffer = "different values or gradients of a parameter in ShardOptions::ignored";
  return {.title = "Experts, and what is left alone", .idioms = {
    {.what = "an expert on each rank, a unit on a mesh of this rank alone, below a unit of all ranks", .act = [](Run& run) {
       const auto model = mixture(run);
       train(run, *model, [](int) { return true; });
     }},
    {.what = "such experts, and gradients clipped by the norm of all of them", .act = [](Run& run) {
       const auto model = mixture(run);
       train(run, *model, [&](int) {
         const double norm = norm_of(run, *model);
         const torch::NoGradGuard no_grad;
         for (const auto& parameter : run.parameters(*model)) parameter.mutable_grad().mul_(std::min(1.0, 0.05 / (norm + 1e-6)));
         run.record(norm);
         return true;
       });
     }, .within = 1e-5, .because = kOrder},
    {.what = "such experts, and steps left out where the norm is not finite, because one expert has inf", .act = [](Run& run) {
       const auto model = mixture(run);
       train(run, *model, [&](int step) {
         if (step == 1) overflow_on_the_last_rank(run, *model);
         const bool finite = std::isfinite(norm_of(run, *model));
         run.record(finite ? 1 : 0);
         return finite;
       });
     }},
    {.what = "such experts under a `GradScaler`, where one expert has inf", .act = [](Run& run) {
       const auto model = mixture(run);
       const auto optimizer = run.sgd(*model);
       optim::GradScaler scaler({.init_scale = 4});
       for (int step = 0; step < 3; step++) {
         run.backward(scaler.scale(loss_of(run, *model, step)));
         if (step == 1) overflow_on_the_last_rank(run, *model);
         if (run.sharded()) {
           optimizer.ours() != nullptr ? scaler.step(*optimizer.ours()) : scaler.step(*optimizer.theirs());
           scaler.update();
         } else {
           const torch::NoGradGuard no_grad;
           const bool finite = std::isfinite(norm_of(run, *model));
           for (const auto& parameter : run.parameters(*model)) parameter.mutable_grad().div_(scaler.get_scale());
           if (finite) optimizer.step();
           if (!finite) scaler = optim::GradScaler({.init_scale = 2});
         }
         optimizer.zero_grad();
         run.record(scaler.get_scale());
       }
       run.record_parameters(*model);
     }},
    {.what = "`full_state` of such a model", .act = [](Run& run) { full_state(*mixture(run)); },
     .refused = "would keep one of several parameters of the same name", .remark = "`full_state` of an expert gives that of this rank's"},
    {.what = "`full_state` where each expert has a name of its own", .act = [](Run& run) {
       full_state(*mixture(run, "expert_" + std::to_string(run.rank())));
     }, .refused = "would leave out what only some of the ranks have", .remark = "`checkpoint::save` keeps all of them"},
    {.what = "an ignored layer whose gradients the program averages, by `average_gradients`", .act = [](Run& run) {
       const auto model = with_ignored(run);
       const auto optimizer = run.adamw(*model);
       for (int step = 0; step < 4; step++) {
         const auto loss = loss_of(run, *model, step);
         run.backward(loss);
         average(run, *model);
         optimizer.step();
         optimizer.zero_grad();
         run.record(loss);
       }
       run.record_parameters(*model);
     }},
    {.what = "the same over two micro-batches, and clipped", .act = [](Run& run) {
       const auto model = with_ignored(run);
       const auto optimizer = run.sgd(*model);
       for (int step = 0; step < 4; step++) {
         for (int part = 0; part < 2; part++) run.backward(loss_of(run, *model, 2 * step + part) / 2);
         average(run, *model);
         clip(run, *model);
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(*model);
     }, .within = 1e-5, .because = kOrder},
    {.what = "an ignored layer that an optimizer of its own trains", .act = [](Run& run) {
       const auto model = with_ignored(run);
       const auto rest = run.adamw(*model->second), own = run.sgd(model->first->parameters(), 0.1);
       for (int step = 0; step < 4; step++) {
         const auto loss = loss_of(run, *model, step);
         run.backward(loss);
         average(run, *model);
         for (const auto& optimizer : {rest, own}) {
           optimizer.step();
           optimizer.zero_grad();
         }
         run.record(loss);
       }
       run.record_parameters(*model);
     }},
    {.what = "an ignored layer that is frozen", .act = [](Run& run) {
       const auto model = with_ignored(run);
       for (auto& parameter : model->first->parameters()) parameter.set_requires_grad(false);
       const auto loss = [&](int step) { return loss_of(run, *model, step); };
       run.train(*model, loss, run.adamw(*model));
     }},
    {.what = "an ignored layer whose gradients nobody averages, clipped", .act = [](Run& run) {
       const auto model = with_ignored(run);
       run.backward(loss_of(run, *model, 0));
       clip(run, *model);
     }, .refused = kDiffer},
    {.what = "an ignored layer whose gradients nobody averages, trained and read by `full_state_dict`", .act = [](Run& run) {
       const auto model = with_ignored(run);
       const auto optimizer = run.sgd(*model);
       run.backward(loss_of(run, *model, 0));
       optimizer.step();
       checkpoint::full_state_dict(*model);
     }, .refused = "average_gradients(parameters, world) after backward", .remark = "by the step of Tessera's optimizers, else by the state"},
    {.what = "an ignored layer that starts with other values on each rank", .act = [](Run& run) {
       const auto model = with_ignored(run);
       {
         const torch::NoGradGuard no_grad;
         model->first->bias.add_(run.rank());
       }
       run.backward(loss_of(run, *model, 0));
       average(run, *model);
       clip(run, *model);
     }, .refused = kDiffer},
  }};
}

}  // namespace tessera::idioms::parts
