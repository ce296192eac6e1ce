// Hooks on weights, on what `parameters()` lists, and on activations: what they see and what becomes of what they return.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "idiom.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/reduction.h"

namespace tessera::idioms::hooks {
namespace {

namespace nn = torch::nn;

/// Four steps of a model that is sharded already; records all gradients.
void train(Run& run, Mlp& net, const std::function<void(int step)>& before = {}) {
  const auto parameters = run.parameters(net);
  const auto optimizer = run.adamw(parameters);
  for (int step = 0; step < 4; step++) {
    if (before) before(step);
    const auto loss = loss_of(run, net, step);
    run.backward(loss);
    run.record_gradients(parameters);
    optimizer.step();
    optimizer.zero_grad();
    run.record(loss);
  }
  run.record_parameters(net);
}

at::Tensor halved(const at::Tensor& gradient) {
  return gradient * 0.5;
}

/// A function that is not linear: applied before the mean over the ranks it gives another result than after it.
at::Tensor clamped(const at::Tensor& gradient) {
  return gradient.clamp(-0.01, 0.01);
}

struct Nothing : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&) override {
    return outputs;
  }
};

}  // namespace

Chapter chapter() {
  return {.title = "Hooks", .idioms = {
    // --- On whole weights ---
    {.what = "`weight.register_hook` before sharding, which clamps", .act = [](Run& run) {
       Mlp net;
       net.first->weight.register_hook(clamped);
       run.shard_nested(net);
       train(run, net);
     }, .remark = "it acts on this rank's whole gradient, before the mean over the ranks"},
    {.what = "`layer->weight.register_hook` after sharding, which clamps", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.register_hook(clamped);
       train(run, net);
     }, .remark = "it acts on this rank's whole gradient, before the mean over the ranks"},
    {.what = "hooks before sharding on all parameters of one unit", .act = [](Run& run) {
       Mlp net;
       for (auto& p : net.parameters()) p.register_hook(clamped);
       run.shard(net);
       train(run, net);
     }},
    {.what = "a hook that scales by what this rank chooses", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.second->weight.register_hook([&](const at::Tensor& gradient) { return gradient * (run.rank() + 1); });
       train(run, net);
     }},
    {.what = "a hook that masks rows of a weight's gradient", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto mask = (values({5, 1}) > 0).to(torch::kFloat);
       net.first->weight.register_hook([mask](const at::Tensor& gradient) { return gradient * mask; });
       train(run, net);
     }},
    {.what = "a hook that adds decay, reading the weight itself", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.register_hook([&](const at::Tensor& gradient) { return gradient + 0.125 * net.first->weight.detach(); });
       train(run, net);
     }},
    {.what = "a hook that only looks, and keeps the largest value", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.register_hook([&](const at::Tensor& gradient) { run.record(gradient.abs().max()); });
       train(run, net);
     }},
    {.what = "a hook that keeps the whole gradient of each pass", .act = [](Run& run) {
       Mlp net;
       net.second->weight.register_hook([&](const at::Tensor& gradient) { run.record(gradient); });
       run.shard(net);
       train(run, net);
     }},
    {.what = "two hooks on one weight, before and after sharding, in their order", .act = [](Run& run) {
       Mlp net;
       net.first->weight.register_hook([](const at::Tensor& gradient) { return gradient * 4; });
       run.shard_nested(net);
       net.first->weight.register_hook(clamped);
       train(run, net);
     }},
    {.what = "`remove_hook` after some steps", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto place = net.first->weight.register_hook(clamped);
       train(run, net, [&](int step) {
         if (step == 2) net.first->weight.remove_hook(place);
       });
     }},
    {.what = "`remove_hook` after sharding of a hook from before", .act = [](Run& run) {
       Mlp net;
       const auto place = net.first->weight.register_hook(clamped);
       run.shard_nested(net);
       train(run, net, [&](int step) {
         if (step == 2) net.first->weight.remove_hook(place);
       });
     }},
    {.what = "a hook on a weight that is frozen and thawed meanwhile", .act = [](Run& run) {
       Mlp net;
       net.first->weight.register_hook(clamped);
       run.shard_nested(net);
       net.first->bias.register_hook(clamped);
       train(run, net, [&](int step) {
         for (auto& p : run.parameters(*net.first)) p.set_requires_grad(step % 2 == 0);
       });
     }},
    {.what = "a hook on a weight that is used twice, called once with the sum", .act = [](Run& run) {
       nn::Linear layer(5, 5);
       fill(*layer);
       run.shard(layer);
       int calls = 0;
       layer->weight.register_hook([&](const at::Tensor& gradient) {
         calls++;
         return gradient.clamp(-0.01, 0.01);
       });
       run.train(*layer, [&](int step) { return layer(torch::tanh(layer(run.batch({4, 5}, step)))).pow(2).mean(); }, run.adamw(*layer));
       run.record(calls);
     }},
    {.what = "a hook while gradients accumulate over passes, called in each", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.second->weight.register_hook(clamped);
       const auto optimizer = run.adamw(net);
       for (int step = 0; step < 3; step++) {
         for (int pass = 0; pass < 2; pass++) run.backward(loss_of(run, net, 2 * step + pass));
         run.record_gradients(run.parameters(net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "hooks on the weights of an `LSTM`, before sharding", .act = [](Run& run) {
       nn::LSTM lstm(5, 3);
       fill(*lstm);
       for (auto& p : lstm->parameters()) p.register_hook(clamped);
       run.shard(lstm);
       run.train(*lstm, [&](int step) { return std::get<0>(lstm(run.batch({4, 2, 5}, step))).pow(2).mean(); }, run.adamw(*lstm));
     }},
    {.what = "a hook on a view of the weight, made in each pass", .act = [](Run& run) {
       nn::Linear layer(5, 5);
       fill(*layer);
       run.shard(layer);
       run.train(*layer, [&](int step) {
         const auto transposed = layer->weight.t();
         transposed.register_hook(clamped);
         return layer(run.batch({4, 5}, step)).mm(transposed).pow(2).mean();
       }, run.adamw(*layer));
     }},
    {.what = "a hook that replaces values that are not finite", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       for (const auto& p : {net.first->weight, net.first->bias, net.second->weight, net.second->bias}) {
         p.register_hook([](const at::Tensor& gradient) { return torch::nan_to_num(gradient, 0.5, 0.25, -0.25); });
       }
       const auto optimizer = run.sgd(net);
       for (int step = 0; step < 4; step++) {
         const auto loss = loss_of(run, net, step);
         run.backward(step == 1 ? loss / 0 : loss);
         run.record_gradients(run.parameters(net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    // --- On what parameters() lists ---
    {.what = "hooks on what `parameters()` lists after sharding, which halve", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       for (auto& p : run.parameters(net)) p.register_hook(halved);
       train(run, net);
     }, .remark = "they act on this rank's part of the mean"},
    {.what = "a hook on `named_parameters()[\"second.bias\"]`, removed again", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       const auto bias = net.named_parameters()["second.bias"];
       const auto place = bias.register_hook(halved);
       train(run, net, [&](int step) {
         if (step == 2) bias.remove_hook(place);
       });
     }},
    {.what = "hooks on a weight and on its entry in `parameters()`, both", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.register_hook(clamped);
       run.parameters(net)[0].register_hook(halved);
       train(run, net);
     }},
    {.what = "a hook on what `parameters()` lists that counts, once in each pass", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       int calls = 0;
       for (auto& p : run.parameters(net)) p.register_hook([&](const at::Tensor&) { calls++; });
       train(run, net);
       run.record(calls);
     }},
    {.what = "`tessera::register_gradient_hook` on what `parameters()` lists, which halves the gradient", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       const auto optimizer = run.adamw(parameters);
       const auto halve = [](const at::Tensor& parameter) {
         const torch::NoGradGuard no_grad;
         parameter.grad().mul_(0.5);
       };
       for (const auto& p : parameters) {
         if (run.sharded()) register_gradient_hook(p, halve);
       }
       for (int step = 0; step < 3; step++) {
         run.backward(loss_of(run, net, step));
         if (!run.sharded()) std::ranges::for_each(parameters, halve);
         run.record_gradients(parameters);
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    // --- On activations ---
    {.what = "a hook on an activation, and on the input", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.train(net, [&](int step) {
         const auto x = run.batch({4, 6}, step).requires_grad_(true);
         x.register_hook([&](const at::Tensor& gradient) { run.record(gradient); });
         const auto h = torch::tanh(net.first(x));
         h.register_hook(clamped);
         return net.second(h).pow(2).mean();
       }, run.adamw(net));
     }},
    {.what = "a hook on an activation that calls a layer of the model", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.train(net, [&](int step) {
         const auto h = torch::tanh(net.first(run.batch({4, 6}, step)));
         h.register_hook([&](const at::Tensor& gradient) {
           const torch::NoGradGuard no_grad;
           run.record(net.second(gradient));
         });
         return net.second(h).pow(2).mean();
       }, run.adamw(net));
     }},
    {.what = "`retain_grad()` on an activation", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       for (int step = 0; step < 3; step++) {
         auto h = torch::tanh(net.first(run.batch({4, 6}, step)));
         h.retain_grad();
         run.backward(net.second(h).pow(2).mean());
         run.record(h.grad());
       }
       run.record_gradients(run.parameters(net));
     }},
    // --- Refused ---
    {.what = "`layer->weight.retain_grad()`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.retain_grad();
       for (int step = 0; step < 2; step++) run.backward(loss_of(run, net, step));
     }, .refused = "its gradient is with its shard"},
    {.what = "a hook on a weight's gradient accumulator, before sharding", .act = [](Run& run) {
       Mlp net;
       const auto accumulator = torch::autograd::impl::grad_accumulator(net.first->weight);
       accumulator->add_post_hook(std::make_unique<Nothing>());
       run.shard_nested(net);
       train(run, net);
     }, .refused = "hooks on its gradient accumulator"},
    {.what = "an optimizer's `step()` in a hook", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       optim::SGD optimizer(run.parameters(net), {.lr = 0.1});
       net.first->weight.register_hook([&](const at::Tensor&) { optimizer.step(); });
       run.backward(loss_of(run, net, 0));
     }, .refused = "step() was called during backward", .remark = "`step_in_backward()` is the way to update units early"},
    {.what = "`tessera::full_params` in a hook", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.register_hook([&](const at::Tensor&) { (void)full_params(net); });
       run.backward(loss_of(run, net, 0));
     }, .refused = "full_params was called during backward"},
  }};
}

}  // namespace tessera::idioms::hooks
