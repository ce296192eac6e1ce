// Changing parameters other than by an optimizer: in place, through views and pointers, inside and outside of tessera::full_params.
#include <cstring>

#include "idiom.h"
#include "tessera/optim/average.h"
#include "tessera/shard/full_params.h"

namespace tessera::idioms::writing {
namespace {

namespace nn = torch::nn;

/// Four steps, each of which ends with what the idiom does.
void train(Run& run, Mlp& net, const std::function<void()>& at_end) {
  const auto optimizer = run.adamw(net);
  for (int step = 0; step < 4; step++) {
    const auto loss = loss_of(run, net, step);
    run.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    const torch::NoGradGuard no_grad;
    at_end();
    run.record(loss);
  }
  run.record(loss_of(run, net, 9));
  run.record_parameters(net);
}

/// What a program does while one average of its model is in place, with another one.
void with_average_in_place(Run& run, const std::function<void(const std::shared_ptr<Mlp>& net, optim::Average& other)>& act) {
  const auto net = nested(run);
  optim::Average average(net), other(net);
  const auto swapped = average.swapped();
  act(net, other);
}

/// Evaluations, each after what the idiom does.
void evaluate_after(Run& run, Mlp& net, const std::function<void()>& change) {
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < 4; step++) {
    change();
    run.record(loss_of(run, net, step));
  }
}

/// Four steps, after each of which every parameter is given to the idiom.
void train_each(Run& run, void (*change)(at::Tensor parameter)) {
  Mlp net;
  run.shard_nested(net);
  train(run, net, [&] {
    for (const auto& parameter : run.parameters(net)) change(parameter);
  });
}

/// Unshards the parameters of a sharded run by full_params(); does nothing in the plain run.
std::optional<FullParams> whole(const Run& run, nn::Module& model, Access access) {
  if (!run.sharded()) return std::nullopt;
  return full_params(model, access);
}

/// In a sharded run alone: a write that is refused.
void write_whole(Run& run, const std::function<void(Mlp&)>& write) {
  Mlp net;
  run.shard_nested(net);
  net.forward(run.batch({4, 6}));
  const torch::NoGradGuard no_grad;
  write(net);
}

}  // namespace

Chapter chapter() {
  return {.title = "Writing parameters", .idioms = {
    // --- In place, all parameters alike ---
    {.what = "`p.clamp_(-0.2, 0.2)` after each step", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.clamp_(-0.2, 0.2); });
     }},
    {.what = "weight decay by hand, `p.mul_(0.9)`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.mul_(0.9); });
     }},
    {.what = "writes through `p.data()` and `p.detach()`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) {
         p.data().mul_(0.5);
         p.detach().add_(0.25);
       });
     }},
    {.what = "writes through a view, `p.view({-1})`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.view({-1}).mul_(0.5); });
     }},
    {.what = "small weights to zero, `p.masked_fill_(p.abs() < 0.1, 0)`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.masked_fill_(p.abs() < 0.1, 0); });
     }},
    {.what = "`p.copy_(torch::where(p > 0, p, 0.5 * p))`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.copy_(torch::where(p > 0, p, 0.5 * p)); });
     }},
    {.what = "soft shrinkage, `p.sign() * (p.abs() - t).clamp_min(0)`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { p.copy_(p.sign() * (p.abs() - 0.03125).clamp_min(0)); });
     }},
    {.what = "decay of matrices only, told by `p.dim() >= 2`", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) {
         if (p.dim() >= 2) p.mul_(0.75);
       });
     }},
    {.what = "`torch::_foreach_mul_` over all parameters", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&] { torch::_foreach_mul_(run.parameters(net), 0.9); });
     }},
    {.what = "gradient descent by hand, `p.sub_(p.grad() * lr)`", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       for (int step = 0; step < 4; step++) {
         const auto loss = loss_of(run, net, step);
         run.backward(loss);
         const torch::NoGradGuard no_grad;
         for (auto& p : run.parameters(net)) {
           p.sub_(p.grad() * 0.125);
           p.mutable_grad() = at::Tensor();
         }
         run.record(loss);
       }
       run.record_parameters(net);
     }},
    {.what = "the weights of one layer reset to zero in mid-run", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       int step = 0;
       train(run, net, [&] {
         if (step++ != 1) return;
         for (auto& p : run.parameters(*net.second)) p.zero_();
       });
     }},
    // --- Averages and copies ---
    {.what = "exponential averages of the parameters, written back at the end", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       std::vector<at::Tensor> averages;
       for (const auto& p : parameters) averages.push_back(p.detach().clone());
       train(run, net, [&] {
         for (size_t i = 0; i < averages.size(); i++) averages[i].mul_(0.75).add_(parameters[i], 0.25);
       });
       const torch::NoGradGuard no_grad;
       for (size_t i = 0; i < averages.size(); i++) at::Tensor(parameters[i]).copy_(averages[i]);
       run.record(loss_of(run, net, 1));
       run.record_parameters(net);
     }},
    {.what = "evaluation with averaged parameters, then back to the trained ones", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       const auto parameters = run.parameters(net);
       std::vector<at::Tensor> averages;
       for (const auto& p : parameters) averages.push_back(p.detach().clone());
       train(run, net, [&] {
         std::vector<at::Tensor> trained;
         for (size_t i = 0; i < averages.size(); i++) {
           averages[i].mul_(0.5).add_(parameters[i] * 0.5);
           trained.push_back(parameters[i].detach().clone());
           at::Tensor(parameters[i]).copy_(averages[i]);
         }
         run.record(loss_of(run, net, 5));
         for (size_t i = 0; i < averages.size(); i++) at::Tensor(parameters[i]).copy_(trained[i]);
       });
     }},
    {.what = "a target network, `target_p.copy_(tau * p + (1 - tau) * target_p)`, both sharded alike", .act = [](Run& run) {
       Mlp net, target;
       for (auto& p : target.parameters()) p.set_requires_grad(false);
       run.shard_nested(net);
       run.shard_nested(target);
       const auto from = run.parameters(net), to = run.parameters(target);
       train(run, net, [&] {
         for (size_t i = 0; i < to.size(); i++) at::Tensor(to[i]).copy_(0.25 * from[i] + 0.75 * to[i]);
         run.record(target.forward(run.batch({4, 6})));
       });
       run.record_parameters(target);
     }},
    {.what = "the mean of the parameters of several steps (stochastic weight averaging)", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       std::vector<at::Tensor> sums;
       train(run, net, [&] {
         const auto parameters = run.parameters(net);
         for (size_t i = 0; i < parameters.size(); i++) {
           if (sums.size() <= i) sums.push_back(torch::zeros_like(parameters[i]));
           sums[i].add_(parameters[i]);
         }
       });
       const torch::NoGradGuard no_grad;
       const auto parameters = run.parameters(net);
       for (size_t i = 0; i < sums.size(); i++) at::Tensor(parameters[i]).copy_(sums[i] / 4);
       run.record(loss_of(run, net, 2));
     }},
    {.what = "`optim::Average` of a model that is sharded or not, and evaluation with it in place", .act = [](Run& run) {
       const auto net = nested(run);
       optim::Average average(net, {.decay = 0.5});
       train(run, *net, [&] {
         average.update();
         const auto swapped = average.swapped();
         run.record(loss_of(run, *net, 5));
       });
     }, .within = 1e-6, .because = "shards end where vector instructions do not"},
    {.what = "a fast and a slow `optim::Average`, one after the other in place", .act = [](Run& run) {
       const auto net = nested(run);
       optim::Average fast(net, {.decay = 0.25}), slow(net, {.decay = 0.75});
       train(run, *net, [&] {
         for (auto* const average : {&fast, &slow}) {
           average->update();
           const auto swapped = average->swapped();
           run.record(loss_of(run, *net, 5));
         }
       });
     }, .within = 1e-6, .because = "shards end where vector instructions do not"},
    {.what = "an `optim::Average` made before `fully_shard`", .act = [](Run& run) {
       const auto net = std::make_shared<Mlp>();
       optim::Average average(net);
       run.shard_nested(*net);
       train(run, *net, [&] { average.update(); });
     }, .refused = "made before fully_shard"},
    {.what = "an `optim::Average` made while another is in place", .act = [](Run& run) {
       with_average_in_place(run, [](const auto& net, auto& /*other*/) { const optim::Average late(net); });
     }, .refused = "while the model has another Average in place"},
    {.what = "an `optim::Average` moved while another is in place, by `update` or `assign`", .act = [](Run& run) {
       with_average_in_place(run, [](const auto& /*net*/, auto& other) { other.update(); });
     }, .refused = "while the model has another Average in place"},
    {.what = "two `optim::Average` swapped over each other", .act = [](Run& run) {
       with_average_in_place(run, [](const auto& /*net*/, auto& other) { const auto swapped = other.swapped(); });
     }, .refused = "while the model has another Average in place"},
    {.what = "an `optim::Average` of a part, swapped over that of the model", .act = [](Run& run) {
       with_average_in_place(run, [](const auto& net, auto& /*other*/) { optim::Average(net->second.ptr()).update(); });
     }, .refused = "while the model has another Average in place"},
    // --- Whole parameters, inside of full_params ---
    {.what = "`nn::init` inside of `tessera::full_params`, before training", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       {
         const auto guard = whole(run, net, Access::Write);
         nn::init::eye_(net.first->weight);
         nn::init::constant_(net.first->bias, 0.1);
         nn::init::ones_(net.second->weight);
       }
       train(run, net, [] {});
     }},
    {.what = "`model.apply(init)` inside of `tessera::full_params`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       {
         const auto guard = whole(run, net, Access::Write);
         const torch::NoGradGuard no_grad;
         net.apply([](nn::Module& module) {
           if (auto* layer = module.as<nn::LinearImpl>()) layer->weight.copy_(values(layer->weight.sizes(), 4));
         });
       }
       train(run, net, [] {});
     }},
    {.what = "rows scaled to length 1 after each step, inside of `tessera::full_params`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&] {
         const auto guard = whole(run, net, Access::Write);
         net.first->weight.div_(net.first->weight.norm(2, 1, true));
       });
     }},
    {.what = "a projection onto symmetric matrices of one layer, which alone is made whole", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&] {
         const auto guard = whole(run, *net.second, Access::Write);
         const auto square = net.second->weight.narrow(1, 0, 3);
         square.copy_((square + square.t()) * 0.5);
       });
     }},
    {.what = "one row set, `weight[2].zero_()`, inside of `tessera::full_params`", .act = [](Run& run) {
       Mlp net;
       run.shard(net);
       train(run, net, [&] {
         const auto guard = whole(run, net, Access::Write);
         net.first->weight[2].zero_();
         net.first->bias.index_put_({2}, 0.5);
       });
     }},
    {.what = "an accessor that reads and writes inside of `tessera::full_params`", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&] {
         const auto guard = whole(run, net, Access::Write);
         auto weight = net.first->weight.accessor<float, 2>();
         for (int64_t i = 0; i < weight.size(0); i++) weight[i][0] += 0.5F * weight[i][4];
       });
     }},
    {.what = "weights copied out by pointer inside of `tessera::full_params`, for reading", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       train(run, net, [&] {
         const auto guard = whole(run, net, Access::Read);
         const auto* begin = net.second->weight.const_data_ptr<float>();
         const std::vector<float> copy(begin, begin + net.second->weight.numel());
         run.record(torch::tensor(copy));
       });
     }},
    // --- Raw pointers to shards ---
    {.what = "`p.data_ptr<float>()` of every parameter, asked for in each step", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) {
         auto* values = p.data_ptr<float>();
         for (int64_t i = 0; i < p.numel(); i++) values[i] *= 0.5F;
       });
     }},
    {.what = "`p.accessor` over every matrix, asked for in each step", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) {
         if (p.dim() != 2) return;
         auto values = p.accessor<float, 2>();
         for (int64_t i = 0; i < values.size(0); i++) {
           for (int64_t j = 0; j < values.size(1); j++) values[i][j] = std::min(values[i][j], 0.25F);
         }
       });
     }},
    {.what = "`torch::from_blob` over a parameter's memory, made anew in each step", .act = [](Run& run) {
       train_each(run, [](at::Tensor p) { torch::from_blob(p.data_ptr<float>(), {p.numel()}).mul_(0.5); });
     }},
    {.what = "`std::memcpy` from a copy of the parameters that was made earlier", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       std::vector<std::vector<float>> first;
       for (const auto& p : run.parameters(net)) {
         const auto* begin = p.const_data_ptr<float>();
         first.emplace_back(begin, begin + p.numel());
       }
       int step = 0;
       train(run, net, [&] {
         if (step++ != 2) return;
         const auto parameters = run.parameters(net);
         for (size_t i = 0; i < first.size(); i++) {
           auto* to = parameters[i].data_ptr<float>();
           if (!first[i].empty()) std::memcpy(to, first[i].data(), first[i].size() * sizeof(float));
         }
       });
     }},
    {.what = "a pointer to a parameter that is kept, and written through in later steps", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameter = run.parameters(net)[0];
       auto* kept = parameter.data_ptr<float>();
       evaluate_after(run, net, [&] { kept[0] += 0.5F; });
     }, .refused = "kept from before"},
    {.what = "`torch::from_blob` over a parameter's memory, kept over steps", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto parameter = run.parameters(net)[0];
       auto kept = torch::from_blob(parameter.data_ptr<float>(), {parameter.numel()});
       evaluate_after(run, net, [&] { kept.add_(0.5); });
     }, .refused = "kept from before"},
    // --- Refused ---
    {.what = "`layer->weight.data_ptr()` of a whole parameter", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       net.first->weight.data_ptr<float>()[0] = 1;
     }, .refused = "raw pointers need tessera::full_params"},
    {.what = "an accessor over a whole parameter", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       run.record(net.first->weight.accessor<float, 2>()[0][0]);
     }, .refused = "raw pointers need tessera::full_params"},
    {.what = "`nn::init::zeros_(layer->weight)`", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { nn::init::zeros_(net.first->weight); });
     }, .refused = "would write"},
    {.what = "`layer->reset_parameters()`", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { net.first->reset_parameters(); });
     }, .refused = "would write"},
    {.what = "`layer->weight.mul_(mask)`", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { net.second->weight.mul_(torch::ones({3, 5}).tril()); });
     }, .refused = "would write"},
    {.what = "`layer->weight.data().clamp_()`, and writes through other views", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { net.second->weight.data().t()[0].clamp_(-1, 1); });
     }, .refused = "would write"},
    {.what = "`torch::add_out` into a whole parameter", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { torch::add_out(net.second->bias, torch::ones({3}), torch::ones({3})); });
     }, .refused = "would write"},
    {.what = "`layer->weight.set_data(...)`", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { net.second->weight.set_data(torch::ones({3, 5})); });
     }, .refused = "cut it off"},
    {.what = "`model.to(torch::kDouble)` after sharding", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { net.to(torch::kDouble); });
     }, .refused = "before fully_shard"},
    {.what = "`model.to(torch::kXPU)` after sharding, where no such device is", .act = [](Run& run) {
       write_whole(run, [](Mlp& net) { net.to(torch::kXPU); });
     }, .refused = "xpu"},
    {.what = "`Embedding` with `max_norm`, which writes in its forward pass", .act = [](Run& run) {
       nn::Embedding words(nn::EmbeddingOptions(7, 3).max_norm(0.5));
       run.shard(words);
       words(torch::tensor({1, 2}));
     }, .refused = "aten::embedding_renorm_"},
    {.what = "`nn::utils::vector_to_parameters`", .act = [](Run& run) {
       write_whole(run, [&](Mlp& net) {
         const auto parameters = run.parameters(net);
         nn::utils::vector_to_parameters(torch::zeros({66}), parameters);
       });
     }, .refused = "vector_to_parameters"},
    {.what = "a write to parameters between forward and backward", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto loss = loss_of(run, net, 0);
       {
         const torch::NoGradGuard no_grad;
         for (auto& p : run.parameters(net)) p.mul_(0.5);
       }
       run.backward(loss);
     }, .refused = "modified by an inplace operation"},
  }};
}

}  // namespace tessera::idioms::writing
