// Idioms found in reviews: places in shards, random numbers, buffers for many gradients, vectors of parameters, threads.
#include <thread>

#include "idiom.h"
#include "tessera/shard/local.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"

namespace tessera::idioms::places {
namespace {

namespace nn = torch::nn;

/// A layer that is not always used.
struct Net : nn::Module {
  nn::Linear first{nullptr}, second{nullptr};
  Net() {
    first = register_module("first", nn::Linear(5, 7));
    second = register_module("second", nn::Linear(7, 5));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool both = true) { return both ? second(torch::tanh(first(x))) : first(x); }
};

/// In a sharded run: something that is done to a parameter or its gradient after a backward pass.
void act(Run& run, const std::function<void(at::Tensor parameter)>& what) {
  Net net;
  run.shard_nested(net);
  run.backward(net.forward(run.batch({4, 5})).pow(2).mean());
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : run.parameters(net)) what(parameter);
}

ShardOptions flat(const Run& run) {
  return {.mesh = run.world(), .listing = Listing::Flat};
}

void train_flat(Run& run, const std::function<bool(int step)>& both, const std::function<void(Net&, int step)>& before) {
  Net net;
  run.shard(net, flat(run));
  const auto optimizer = run.adamw(net);
  for (int step = 0; step < 4; step++) {
    before(net, step);
    const auto loss = net.forward(run.batch({4, 5}, step), both(step)).pow(2).mean();
    run.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    run.record(loss);
  }
}

}  // namespace

Chapter chapter() {
  constexpr auto kPlaces = "picks values by their places";
  constexpr auto kRandom = "would draw numbers for this rank's part";
  return {.title = "Places, lots and vectors", .idioms = {
    {.what = "the padding row set to zero, `p[0].zero_()`", .act = [](Run& run) { act(run, [](at::Tensor p) { p[0].zero_(); }); },
     .refused = kPlaces, .remark = "inside `full_params` it works"},
    {.what = "one row's gradient dropped, `p.grad()[1].zero_()`", .act = [](Run& run) {
       act(run, [](const at::Tensor& p) { p.grad()[1].zero_(); });
     }, .refused = kPlaces},
    {.what = "some rows scaled, `p.narrow(0, 0, 2).mul_(2)`", .act = [](Run& run) {
       act(run, [](const at::Tensor& p) { p.narrow(0, 0, 2).mul_(2); });
     }, .refused = kPlaces},
    {.what = "a slice of an index, `p.index({Slice(0, 2)})`", .act = [](Run& run) {
       act(run, [](const at::Tensor& p) { p.index({torch::indexing::Slice(0, 2)}).zero_(); });
     }, .refused = kPlaces},
    {.what = "parameters drawn anew, `p.normal_()`", .act = [](Run& run) { act(run, [](at::Tensor p) { p.normal_(); }); },
     .refused = kRandom},
    {.what = "`nn::init::xavier_uniform_(p)`", .act = [](Run& run) {
       act(run, [](const at::Tensor& p) {
         if (p.dim() >= 2) nn::init::xavier_uniform_(p);
       });
     }, .refused = kRandom},
    {.what = "noise on gradients, `p.grad().add_(torch::randn_like(p))`", .act = [](Run& run) {
       act(run, [](const at::Tensor& p) { p.grad().add_(torch::randn_like(p)); });
     }, .refused = kRandom},
    {.what = "dropout over a parameter", .act = [](Run& run) { act(run, [](const at::Tensor& p) { torch::dropout(p, 0.5, true); }); },
     .refused = kRandom},
    {.what = "all gradients copied into one buffer", .act = [](Run& run) {
       auto buffer = torch::zeros({200});
       act(run, [&](const at::Tensor& p) { buffer.narrow(0, 0, p.numel()).copy_(p.grad().reshape({-1})); });
     }, .refused = "into a view of an ordinary tensor"},
    {.what = "local gradients copied into one buffer by `tessera::to_local`", .act = [](Run& run) {
       auto buffer = torch::zeros({200});
       act(run, [&](const at::Tensor& p) {
         const auto local = run.sharded() ? to_local(p.grad()) : p.grad();
         buffer.narrow(0, 0, local.numel()).copy_(local.reshape({-1}));
       });
       run.record(1);
     }},
    {.what = "gradients averaged by hand, `world.all_reduce(p.grad())`", .act = [](Run& run) {
       act(run, [&](const at::Tensor& p) { run.world().all_reduce(p.grad(), {.op = Reduce::Mean}).wait(); });
     }, .refused = "all_reduce was given a sharded parameter"},
    {.what = "rank 0's parameters sent to all, `world.broadcast(p.detach())`", .act = [](Run& run) {
       act(run, [&](const at::Tensor& p) { run.world().broadcast(p.detach(), 0).wait(); });
     }, .refused = "broadcast was given a sharded parameter"},
    {.what = "a mask of the whole parameter's shape", .act = [](Run& run) {
       act(run, [](const at::Tensor& p) {
         if (p.dim() == 2) p.mul_(torch::ones({p.dim() == 2 ? 7 : 5, 5}));
       });
     }, .refused = kPlaces},
    {.what = "`Listing::Flat`, all of it used in each pass", .act = [](Run& run) {
       train_flat(run, [](int) { return true; }, [](Net&, int) {});
     }},
    {.what = "`Listing::Flat`, a layer unused in some passes", .act = [](Run& run) {
       train_flat(run, [](int step) { return step != 1; }, [](Net&, int) {});
     }, .refused = "listed flat"},
    {.what = "`Listing::Flat`, one member frozen", .act = [](Run& run) {
       train_flat(run, [](int) { return true; }, [](Net& net, int step) {
         if (step == 2) net.first->weight.set_requires_grad(false);
       });
     }, .refused = "can't be frozen or thawed by itself"},
    {.what = "shards changed only on ranks where they are not empty, `if (p.numel() > 0) p.mul_(0.5)`", .act = [](Run& run) {
       // One value: it lies on the first rank.
       nn::Linear line(nn::LinearOptions(1, 1).bias(false));
       fill(*line);
       run.shard(line);
       for (int step = 0; step < 3; step++) {
         run.backward(line(run.batch({4, 1}, step)).sum());
         const torch::NoGradGuard no_grad;
         for (auto p : run.parameters(*line)) {
           if (p.numel() > 0) p.mul_(0.5);
           p.mutable_grad() = at::Tensor();
         }
       }
     }, .refused = "empty", .remark = "write them on every rank"},
    {.what = "shards changed on all ranks, also where they are empty", .act = [](Run& run) {
       nn::Linear line(nn::LinearOptions(1, 1).bias(false));
       fill(*line);
       run.shard(line);
       for (int step = 0; step < 3; step++) {
         const auto loss = line(run.batch({4, 1}, step)).sum();
         run.backward(loss);
         const torch::NoGradGuard no_grad;
         for (auto p : run.parameters(*line)) {
           p.mul_(0.5);
           p.mutable_grad() = at::Tensor();
         }
         run.record(loss);
       }
       run.record_parameters(*line);
     }},
    {.what = "two models that train in threads of their own, each over `world.duplicate()`", .act = [](Run& run) {
       const Communicator groups[] = {run.world().duplicate(), run.world().duplicate()};
       std::vector<std::unique_ptr<Run>> runs;
       for (const auto& group : groups) runs.push_back(std::make_unique<Run>(group, run.setting()));
       std::vector<std::thread> threads;
       for (auto& own : runs) {
         threads.emplace_back([&own] {
           Net net;
           own->shard_nested(net);
           own->train(net, [&](int step) { return net.forward(own->batch({4, 5}, step)).pow(2).mean(); }, own->adamw(net));
         });
       }
       for (auto& thread : threads) thread.join();
       for (const auto& own : runs) {
         for (const auto& value : own->records()) run.record(value);
       }
     }},
  }};
}

}  // namespace tessera::idioms::places
