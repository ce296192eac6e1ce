// What programs do with gradients between backward and the step: read, zero, scale, accumulate, keep and replace them.
#include "idiom.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/rebind.h"
#include "tessera/shard/reduction.h"

namespace tessera::idioms::gradients {
namespace {

namespace nn = torch::nn;

/// Four steps; what the idiom does stands between backward and the optimizer.
void train(Run& run, Mlp& net, const std::function<void(int step)>& between) {
  const auto parameters = run.parameters(net);
  const auto optimizer = run.adamw(parameters);
  for (int step = 0; step < 4; step++) {
    const auto loss = loss_of(run, net, step);
    run.backward(loss);
    {
      const torch::NoGradGuard no_grad;
      between(step);
    }
    run.record_gradients(parameters);
    optimizer.step();
    optimizer.zero_grad();
    run.record(loss);
  }
  run.record_parameters(net);
}

void train_each(Run& run, void (*change)(at::Tensor parameter)) {
  Mlp net;
  run.shard_nested(net);
  train(run, net, [&](int) {
    for (const auto& parameter : run.parameters(net)) change(parameter);
  });
}

/// One backward pass of a sharded model, and something that mixes the values of gradients.
void mix(Run& run, const std::function<void(const std::vector<at::Tensor>& parameters)>& act) {
  Mlp net;
  run.shard_nested(net);
  run.backward(loss_of(run, net, 0));
  act(run.parameters(net));
}

/// Four steps; what the idiom does with the whole gradients of the module's own members stands between backward and the optimizer.
void train_whole(Run& run, void (*change)(Mlp& net)) {
  Mlp net;
  run.shard_nested(net);
  train(run, net, [&](int) {
    std::optional<FullParams> guard;
    if (run.sharded()) guard.emplace(full_params(net, Access::Write, WithGradients::Yes));
    change(net);
  });
}

constexpr auto kAlone = "would be the result of this rank alone";

}  // namespace

Chapter chapter() {
  return {.title = "Gradients", .idioms = {
    // --- Accumulating ---
    {.what = "gradients accumulated over three batches, then a step", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 3; step++) {
         for (int pass = 0; pass < 3; pass++) run.backward(loss_of(run, net, 3 * step + pass) / 3);
         run.record_gradients(run.parameters(net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "three batches inside `tessera::no_sync` and one outside, then a step", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 3; step++) {
         run.backward([&] {
           for (int pass = 0; pass < 4; pass++) {
             std::optional<NoSync> local;
             if (run.sharded() && pass < 3) local.emplace(no_sync(net));
             (loss_of(run, net, 4 * step + pass) / 4).backward();
           }
         });
         run.record_gradients(run.parameters(net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "all batches inside `tessera::no_sync`, then `tessera::sync_gradients`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.backward([&] {
         {
           std::optional<NoSync> local;
           if (run.sharded()) local.emplace(no_sync(net));
           for (int pass = 0; pass < 3; pass++) loss_of(run, net, pass).backward();
         }
         if (run.sharded()) sync_gradients(net);
       });
       run.record_gradients(run.parameters(net));
     }},
    {.what = "gradients accumulated by hand into buffers of the program", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       const auto optimizer = run.adamw(parameters);
       std::vector<at::Tensor> sums;
       for (const auto& p : parameters) sums.push_back(torch::zeros_like(p));
       for (int step = 0; step < 3; step++) {
         for (int pass = 0; pass < 2; pass++) {
           run.backward(loss_of(run, net, 2 * step + pass));
           for (size_t i = 0; i < sums.size(); i++) sums[i].add_(parameters[i].grad());
           optimizer.zero_grad();
         }
         for (size_t i = 0; i < sums.size(); i++) parameters[i].mutable_grad() = sums[i] * 0.5;
         optimizer.step();
         optimizer.zero_grad();
         for (auto& sum : sums) sum.zero_();
       }
       run.record_parameters(net);
     }},
    {.what = "two losses on one graph, one backward pass after the other", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 3; step++) {
         const auto y = net.forward(run.batch({4, 6}, step));
         run.backward([&] { y.pow(2).mean().backward({}, /*retain_graph=*/true); });
         run.backward(y.abs().mean());
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "a layer that one of the accumulated batches does not use", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 3; step++) {
         run.backward(loss_of(run, net, step));
         run.backward(net.first(run.batch({4, 6}, step + 7)).pow(2).mean());
         run.record_gradients(run.parameters(net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "a layer that no batch of a step uses: no gradient, no decay", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.train(net, [&](int step) {
         const auto h = net.first(run.batch({4, 6}, step));
         return (step % 2 == 0 ? h : net.second(h)).pow(2).mean();
       }, run.adamw(net), 5);
     }},
    // --- Zeroing ---
    {.what = "`model.zero_grad()`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 4; step++) {
         run.backward(loss_of(run, net, step));
         optimizer.step();
         net.zero_grad();
         run.record_gradients(run.parameters(net));
       }
       run.record_parameters(net);
     }},
    {.what = "`model.zero_grad(/*set_to_none=*/false)`, and steps with gradients of zero", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 5; step++) {
         if (step != 2) run.backward(loss_of(run, net, step));
         optimizer.step();
         net.zero_grad(/*set_to_none=*/false);
         run.record_gradients(run.parameters(net));
       }
       run.record_parameters(net);
     }},
    {.what = "`p.grad().zero_()` of one layer: it decays and keeps its momentum", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       train(run, net, [&](int step) {
         if (step == 0) return;
         for (auto& p : run.parameters(*net.first)) p.grad().zero_();
       });
     }},
    {.what = "`p.mutable_grad() = at::Tensor()` of one layer: it is left out of the step", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       train(run, net, [&](int step) {
         if (step % 2 == 0) return;
         for (auto& p : run.parameters(*net.first)) p.mutable_grad() = at::Tensor();
       });
     }},
    {.what = "`layer->weight.mutable_grad() = at::Tensor()` on a member", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&](int step) {
         if (step != 0) net.first->weight.mutable_grad() = at::Tensor();
       });
     }},
    {.what = "`layer->weight.mutable_grad().reset()` on members, in place of `zero_grad`", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 4; step++) {
         const auto loss = loss_of(run, net, step);
         run.backward(loss);
         optimizer.step();
         for (auto layer : {net.first, net.second}) {
           layer->weight.mutable_grad().reset();
           layer->bias.mutable_grad().reset();
         }
         run.record_gradients(run.parameters(net));
         run.record(loss);
       }
       run.record_parameters(net);
     }},
    // --- Scaling ---
    {.what = "a scaled loss, and gradients scaled back, `p.grad().div_(1024)`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 4; step++) {
         run.backward(loss_of(run, net, step) * 1024);
         for (auto& p : run.parameters(net)) p.grad().div_(1024);
         run.record_gradients(run.parameters(net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "`nn::utils::clip_grad_value_`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&](int) { nn::utils::clip_grad_value_(run.parameters(net), 0.01); });
     }},
    {.what = "`tessera::clip_grad_value`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&](int) { clip_grad_value(run.parameters(net), 0.01); });
     }},
    {.what = "gradients of each layer scaled by a factor of its own, `p.grad().mul_`", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       train(run, net, [&](int step) {
         for (auto& p : run.parameters(*net.first)) p.grad().mul_(0.5 + step);
       });
     }},
    {.what = "`torch::_foreach_mul_` over all gradients", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&](int) {
         std::vector<at::Tensor> gradients;
         for (const auto& p : run.parameters(net)) gradients.push_back(p.grad());
         torch::_foreach_mul_(gradients, 0.75);
       });
     }},
    {.what = "decay by the gradient, `p.grad().add_(p, 0.125)`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.grad().add_(p, 0.125); });
     }},
    {.what = "`p.grad().data().clamp_` and `p.grad().detach().mul_`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) {
         p.grad().data().clamp_(-0.02, 0.02);
         p.grad().detach().mul_(2);
       });
     }},
    {.what = "`p.grad().data_ptr<float>()`, read and written after backward", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) {
         auto* values = p.grad().data_ptr<float>();
         for (int64_t i = 0; i < p.grad().numel(); i++) values[i] *= 0.5F;
       });
     }},
    {.what = "`tessera::clip_grad_norm(parameters, 0.05)`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&](int) { run.record(clip_grad_norm(run.parameters(net), 0.05)); });
     }, .within = 1e-4, .because = "the sum in the norm is added up in another order"},
    // --- Replacing ---
    {.what = "the sign in place of the gradient, `p.mutable_grad() = p.grad().sign()`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.mutable_grad() = p.grad().sign(); });
     }},
    {.what = "`p.mutable_grad() = torch::zeros_like(p)` before the first pass", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       for (auto& p : run.parameters(net)) p.mutable_grad() = torch::zeros_like(p);
       train(run, net, [](int) {});
     }},
    {.what = "gradients made by hand, steps without a backward pass", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 3; step++) {
         for (auto& p : run.parameters(net)) p.mutable_grad() = torch::full_like(p, 0.5 - step);
         optimizer.step();
         optimizer.zero_grad();
         run.record(loss_of(run, net, step));
       }
       run.record_parameters(net);
     }},
    {.what = "`torch::autograd::grad` over the parameters, its results put into `mutable_grad()`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       const auto optimizer = run.adamw(parameters);
       for (int step = 0; step < 4; step++) {
         run.backward([&] {
           const auto gradients = torch::autograd::grad({loss_of(run, net, step)}, parameters);
           for (size_t i = 0; i < parameters.size(); i++) parameters[i].mutable_grad() = gradients[i];
         });
         run.record_gradients(parameters);
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    // --- Keeping ---
    {.what = "gradients of the step before, cloned and added", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       std::vector<at::Tensor> last;
       train(run, net, [&](int) {
         const auto parameters = run.parameters(net);
         std::vector<at::Tensor> now;
         for (const auto& p : parameters) now.push_back(p.grad().clone());
         for (size_t i = 0; i < last.size(); i++) parameters[i].grad().add_(last[i], 0.5);
         last = now;
       });
     }},
    {.what = "gradients of the step before, kept without a copy", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       std::vector<at::Tensor> last;
       train(run, net, [&](int) {
         const auto parameters = run.parameters(net);
         std::vector<at::Tensor> now;
         for (const auto& p : parameters) now.push_back(p.grad());
         for (size_t i = 0; i < last.size(); i++) parameters[i].mutable_grad() = now[i] + 0.5 * last[i];
         last = now;
       });
     }},
    {.what = "up the gradient, a second backward pass there, and back (sharpness-aware)", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       const auto optimizer = run.adamw(parameters);
       for (int step = 0; step < 4; step++) {
         run.backward(loss_of(run, net, step));
         std::vector<at::Tensor> ways;
         {
           const torch::NoGradGuard no_grad;
           for (const auto& p : parameters) {
             ways.push_back(p.grad() * 0.25);
             at::Tensor(p).add_(ways.back());
           }
         }
         optimizer.zero_grad();
         const auto loss = loss_of(run, net, step);
         run.backward(loss);
         {
           const torch::NoGradGuard no_grad;
           for (size_t i = 0; i < ways.size(); i++) at::Tensor(parameters[i]).sub_(ways[i]);
         }
         optimizer.step();
         optimizer.zero_grad();
         run.record(loss);
       }
       run.record_parameters(net);
     }},
    {.what = "an optimizer of torch made before sharding and moved by `tessera::rebind`", .act = [](Run& run) {
       Mlp net;
       auto sgd = std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
       run.shard_nested(net);
       if (run.sharded()) rebind(*sgd, net);
       run.train(net, [&](int step) { return loss_of(run, net, step); }, Steps(std::move(sgd)));
     }},
    // --- Refused ---
    {.what = "an optimizer made before sharding, not moved", .act = [](Run& run) {
       Mlp net;
       const auto optimizer = run.sgd(net.parameters());
       run.shard_nested(net);
       for (int step = 0; step < 2; step++) {
         run.backward(loss_of(run, net, step));
         optimizer.step();
       }
     }, .refused = "Make optimizers after fully_shard"},
    {.what = "`layer->weight.grad()` of a member, read", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.backward(loss_of(run, net, 0));
       run.record(net.first->weight.grad() * 2);
     }, .refused = "its gradient is with its shard"},
    {.what = "a gradient that a parameter has before sharding", .act = [](Run& run) {
       Mlp net;
       loss_of(run, net, 0).backward();
       run.shard_nested(net);
     }, .refused = "has a gradient already"},
    // --- Whole gradients, inside `full_params` with `WithGradients::Yes` ---
    {.what = "gradients centred, `p.grad().sub_(p.grad().mean())`, while they are whole", .act = [](Run& run) {
       train_whole(run, [](Mlp& net) {
         for (const auto& p : {net.first->weight, net.second->weight}) p.grad().sub_(p.grad().mean());
       });
     }},
    {.what = "one row of a gradient scaled by the norm of another parameter's, while they are whole", .act = [](Run& run) {
       train_whole(run, [](Mlp& net) { net.first->weight.grad()[2].mul_(net.second->bias.grad().norm()); });
     }},
    {.what = "a gradient replaced by another tensor, while they are whole", .act = [](Run& run) {
       train_whole(run, [](Mlp& net) { net.second->weight.mutable_grad() = net.second->weight.grad().sign() * 0.01; });
     }},
    {.what = "a gradient removed, and one that is there twice, while they are whole", .act = [](Run& run) {
       train_whole(run, [](Mlp& net) {
         net.first->bias.mutable_grad() = at::Tensor();
         net.second->bias.grad().mul_(2);
       });
     }},
    {.what = "a gradient given to a parameter that was frozen in backward, while they are whole", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       const auto optimizer = run.sgd(parameters);
       parameters[1].set_requires_grad(false);
       run.backward(loss_of(run, net, 0));
       parameters[1].set_requires_grad(true);
       {
         std::optional<FullParams> guard;
         if (run.sharded()) guard.emplace(full_params(net, Access::Write, WithGradients::Yes));
         net.first->bias.mutable_grad() = values({5});
       }
       run.record_gradients(parameters);
       optimizer.step();
       run.record_parameters(net);
     }},
    {.what = "norms of whole gradients for a log, which change nothing", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&](int) {
         std::optional<FullParams> guard;
         if (run.sharded()) guard.emplace(full_params(net, Access::Read, WithGradients::Yes));
         for (const auto& p : {net.first->weight, net.second->bias}) run.record(p.grad().norm());
       });
     }},
    {.what = "backward while gradients are whole", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.backward(loss_of(run, net, 0));
       const auto guard = full_params(net, Access::Write, WithGradients::Yes);
       loss_of(run, net, 1).backward();
     }, .refused = "backward inside full_params with WithGradients::Yes"},
    {.what = "whole gradients while a batch inside `tessera::no_sync` waits", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       {
         const auto local = no_sync(net);
         run.backward(loss_of(run, net, 1));
       }
       const auto guard = full_params(net, Access::Write, WithGradients::Yes);
     }, .refused = "gradients of backward passes that were not reduced"},
    {.what = "this rank's own gradients between the batches of `tessera::no_sync`, by `tessera::unsynced_grad`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.backward([&] {
         for (int pass = 0; pass < 3; pass++) {
           std::optional<NoSync> local;
           if (run.sharded() && pass < 2) local.emplace(no_sync(net));
           loss_of(run, net, pass).backward();
           if (pass == 2) break;
           for (const auto& p : {net.first->weight, net.second->bias}) run.record(run.sharded() ? unsynced_grad(p) : p.grad());
         }
       });
       run.record_gradients(run.parameters(net));
     }},
    {.what = "`nn::utils::clip_grad_norm_`", .act = [](Run& run) {
       mix(run, [](auto& parameters) { nn::utils::clip_grad_norm_(parameters, 1.0); });
     }, .refused = "tessera::clip_grad_norm"},
    {.what = "`p.grad().norm()`, for a log", .act = [](Run& run) {
       mix(run, [&](auto& parameters) { run.record(parameters[0].grad().norm()); });
     }, .refused = kAlone},
    {.what = "`(p.grad() * p.grad()).sum()`", .act = [](Run& run) {
       mix(run, [&](auto& parameters) { run.record((parameters[0].grad() * parameters[0].grad()).sum()); });
     }, .refused = kAlone},
    {.what = "`p.grad().isfinite().all()`", .act = [](Run& run) {
       mix(run, [&](auto& parameters) { run.record(parameters[0].grad().isfinite().all()); });
     }, .refused = kAlone},
    {.what = "gradients centred, `p.grad().sub_(p.grad().mean())`", .act = [](Run& run) {
       mix(run, [](auto& parameters) { parameters[0].grad().sub_(parameters[0].grad().mean()); });
     }, .refused = kAlone},
    {.what = "all gradients in one vector, `torch::cat` of `p.grad().flatten()`", .act = [](Run& run) {
       mix(run, [&](auto& parameters) {
         std::vector<at::Tensor> flat;
         for (const auto& p : parameters) flat.push_back(p.grad().flatten());
         run.record(torch::cat(flat));
       });
     }, .refused = kAlone},
    {.what = "a step while a batch inside `tessera::no_sync` waits, after one that was reduced", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       run.backward(loss_of(run, net, 0));
       {
         const auto local = no_sync(net);
         run.backward(loss_of(run, net, 1));
       }
       optimizer.step();
     }, .refused = "gradients of backward passes that were not reduced"},
  }};
}

}  // namespace tessera::idioms::gradients
