// What trains and what does not: frozen before sharding, frozen and thawed in mid-run by every way, in whole units and in parts of them.
#include "idiom.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"

namespace tessera::idioms::freezing {
namespace {

namespace nn = torch::nn;

/// 5 -> 7 -> 7 -> 3.
struct Net : nn::Module {
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  Net() {
    a = register_module("a", nn::Linear(5, 7));
    b = register_module("b", nn::Linear(7, 7));
    c = register_module("c", nn::Linear(7, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
};

at::Tensor loss_of(const Run& run, Net& net, int step) {
  return net.forward(run.batch({4, 5}, step)).pow(2).mean();
}

/// Steps before each of which the idiom may freeze something. Records all gradients, also missing ones.
void train(Run& run, Net& net, const std::function<void(int step)>& before, int steps = 5) {
  const auto parameters = run.parameters(net);
  const auto optimizer = run.adamw(parameters);
  for (int step = 0; step < steps; step++) {
    before(step);
    const auto loss = loss_of(run, net, step);
    run.backward(loss);
    run.record_gradients(parameters);
    optimizer.step();
    optimizer.zero_grad();
    run.record(loss);
  }
  run.record_parameters(net);
}

void set_shards(const Run& run, const nn::Module& module, bool trains) {
  for (auto& parameter : run.parameters(module)) parameter.set_requires_grad(trains);
}

void set_members(nn::Linear& layer, bool trains) {
  layer->weight.set_requires_grad(trains);
  layer->bias.set_requires_grad(trains);
}

Training training(bool trains) {
  return trains ? Training::Trained : Training::Frozen;
}

/// A layer with a low-rank addition that alone trains.
struct Adapted : nn::Module {
  nn::Linear base{nullptr};
  at::Tensor down, up;
  Adapted() {
    base = register_module("base", nn::Linear(5, 5));
    down = register_parameter("down", torch::zeros({5, 2}));
    up = register_parameter("up", torch::zeros({2, 5}));
  }
  at::Tensor forward(const at::Tensor& x) { return base(x) + x.mm(down).mm(up); }
};

}  // namespace

Chapter chapter() {
  return {.title = "Freezing and thawing", .idioms = {
    // --- Before sharding ---
    {.what = "a layer frozen before sharding, a unit of its own", .act = [](Run& run) {
       Net net;
       set_members(net.b, false);
       run.shard_nested(net);
       train(run, net, [](int) {});
     }},
    {.what = "a layer frozen before sharding, in one unit with others", .act = [](Run& run) {
       Net net;
       set_members(net.a, false);
       run.shard(net);
       train(run, net, [](int) {});
     }},
    {.what = "only biases train (BitFit)", .act = [](Run& run) {
       Net net;
       for (auto& item : net.named_parameters()) {
         if (!item.key().ends_with("bias")) item.value().set_requires_grad(false);
       }
       run.shard_nested(net);
       train(run, net, [](int) {});
     }},
    {.what = "an optimizer over those that train, picked by `p.requires_grad()`", .act = [](Run& run) {
       Net net;
       set_members(net.a, false);
       net.b->bias.set_requires_grad(false);
       run.shard(net);
       std::vector<at::Tensor> trained;
       for (const auto& p : run.parameters(net)) {
         if (p.requires_grad()) trained.push_back(p);
       }
       run.record(static_cast<double>(trained.size()));
       run.train(net, [&](int step) { return loss_of(run, net, step); }, run.adamw(trained));
     }},
    {.what = "low-rank adapters on frozen layers (LoRA)", .act = [](Run& run) {
       nn::ModuleList layers;
       for (int i = 0; i < 3; i++) layers->push_back(std::make_shared<Adapted>());
       fill(*layers);
       for (const auto& layer : *layers) {
         for (auto& p : layer->as<Adapted>()->base->parameters()) p.set_requires_grad(false);
       }
       run.shard_nested(layers);
       run.train(*layers, [&](int step) {
         auto x = run.batch({4, 5}, step);
         for (const auto& layer : *layers) x = torch::tanh(layer->as<Adapted>()->forward(x));
         return x.pow(2).mean();
       }, run.adamw(*layers));
     }},
    {.what = "a frozen teacher and a student (distillation), both sharded", .act = [](Run& run) {
       Net teacher, student;
       for (auto& p : teacher.parameters()) p.set_requires_grad(false);
       run.shard_nested(teacher);
       run.shard_nested(student);
       run.train(student, [&](int step) {
         const auto x = run.batch({4, 5}, step);
         return (student.forward(x) - teacher.forward(x * 0.5)).pow(2).mean();
       }, run.adamw(student));
       run.record_parameters(teacher);
     }},
    {.what = "everything frozen, gradients of the input (adversarial examples)", .act = [](Run& run) {
       Net net;
       for (auto& p : net.parameters()) p.set_requires_grad(false);
       run.shard_nested(net);
       auto x = run.batch({4, 5});
       for (int step = 0; step < 4; step++) {
         x = x.detach().requires_grad_(true);
         net.forward(x).pow(2).mean().backward();
         run.record(x.grad());
         x = x + x.grad().sign() * 0.125;
       }
       run.record(net.forward(x));
     }},
    // --- In mid-run, by every way ---
    {.what = "`p.set_requires_grad` on a layer's parameters, off and on in turns", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) { set_shards(run, *net.b, step % 2 == 0); });
     }},
    {.what = "`p.set_requires_grad` off and on in turns, all layers in one unit", .act = [](Run& run) {
       Net net;
       run.shard(net);
       train(run, net, [&](int step) { set_shards(run, *net.b, step % 2 == 1); });
     }},
    {.what = "`p.requires_grad_(false)` and `p.requires_grad_(true)` on what `parameters()` lists", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) {
         for (auto& p : run.parameters(*net.a)) p.requires_grad_(step != 1 && step != 2);
       });
     }},
    {.what = "`layer->weight.set_requires_grad` on the members, off and on in turns", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) { set_members(net.b, step % 2 == 0); }, 6);
     }},
    {.what = "`layer->weight.set_requires_grad` on the members, all layers in one unit", .act = [](Run& run) {
       Net net;
       run.shard(net);
       train(run, net, [&](int step) { set_members(step % 2 == 0 ? net.a : net.c, step / 2 % 2 == 1); }, 7);
     }},
    {.what = "`layer->weight.requires_grad_(false)` on a member", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       net.b->weight.requires_grad_(false);
     }, .refused = "you can only change requires_grad flags of leaf variables",
     .remark = "by libtorch; `set_requires_grad` works"},
    {.what = "`tessera::set_requires_grad(module, ...)`, off and on in turns", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) { set_requires_grad(*net.b, training(step % 2 == 0)); });
     }},
    {.what = "`model.named_parameters()[\"b.weight\"].set_requires_grad`", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) { net.named_parameters()["b.weight"].set_requires_grad(step >= 2); });
     }},
    {.what = "frozen by one way and thawed by another, all of them in turns", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) {
         if (step == 1) set_members(net.b, false);
         if (step == 2) set_shards(run, *net.b, true);
         if (step == 3) set_requires_grad(*net.b, Training::Frozen);
         if (step == 4) set_members(net.b, true);
         if (step == 5) set_shards(run, *net.b, false);
         if (step == 6) set_requires_grad(*net.b, Training::Trained);
       }, 8);
     }},
    {.what = "`layer->weight.requires_grad()` of members, after each way to change it", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       const auto ask = [&] {
         for (const auto& layer : {net.a, net.b, net.c}) run.record(layer->weight.requires_grad() ? 1 : 0);
       };
       train(run, net, [&](int step) {
         if (step == 1) set_members(net.a, false);
         if (step == 2) set_shards(run, *net.b, false);
         if (step == 3) set_requires_grad(net, Training::Trained);
         ask();
       });
       ask();
     }},
    {.what = "a layer that was frozen before sharding, thawed later", .act = [](Run& run) {
       Net net;
       set_members(net.b, false);
       run.shard_nested(net);
       train(run, net, [&](int step) {
         if (step == 2) set_members(net.b, true);
       });
     }},
    {.what = "gradual unfreezing, a layer more in each step, from the last one", .act = [](Run& run) {
       Net net;
       set_members(net.a, false);
       set_members(net.b, false);
       run.shard(net);
       train(run, net, [&](int step) {
         if (step == 1) set_shards(run, *net.b, true);
         if (step == 2) set_shards(run, *net.a, true);
       });
     }},
    {.what = "one parameter of a layer frozen and thawed, its bias", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) { net.b->bias.set_requires_grad(step % 3 == 2); }, 6);
     }},
    {.what = "all but one layer frozen, another one in each step", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       train(run, net, [&](int step) {
         nn::Linear layers[] = {net.a, net.b, net.c};
         for (int i = 0; i < 3; i++) set_members(layers[i], i == step % 3);
       }, 6);
     }},
    {.what = "frozen after backward, before the step, which still applies the gradient", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       const auto optimizer = run.sgd(net);
       for (int step = 0; step < 4; step++) {
         run.backward(loss_of(run, net, step));
         set_shards(run, *net.b, step % 2 == 1);
         optimizer.step();
         optimizer.zero_grad();
         run.record_parameters(net);
       }
     }},
    {.what = "thawed after backward: gradients come with the next pass", .act = [](Run& run) {
       Net net;
       set_members(net.b, false);
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       for (int pass = 0; pass < 3; pass++) {
         run.backward(loss_of(run, net, pass));
         run.record_gradients(parameters);
         set_members(net.b, true);
       }
     }},
    {.what = "frozen while gradients accumulate over passes", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       const auto parameters = run.parameters(net);
       const auto optimizer = run.sgd(parameters);
       for (int step = 0; step < 3; step++) {
         for (int pass = 0; pass < 3; pass++) {
           set_shards(run, *net.b, pass != 1);
           run.backward(loss_of(run, net, 3 * step + pass));
         }
         run.record_gradients(parameters);
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(net);
     }},
    {.what = "adversarial training: the judge is frozen while the maker trains, then the other way round", .act = [](Run& run) {
       Net maker, judge;
       nn::Linear into(3, 5);
       fill(*into);
       for (auto& p : into->parameters()) p.set_requires_grad(false);
       run.shard_nested(maker);
       run.shard_nested(judge);
       const auto make = run.adamw(maker), decide = run.adamw(judge);
       for (int step = 0; step < 4; step++) {
         const auto made = into(maker.forward(run.batch({4, 5}, step)));
         run.backward((judge.forward(made.detach()) - 1).pow(2).mean());
         decide.step();
         decide.zero_grad();
         set_shards(run, judge, false);
         const auto loss = judge.forward(made).pow(2).mean();
         run.backward(loss);
         run.record_gradients(run.parameters(judge));
         set_shards(run, judge, true);
         make.step();
         make.zero_grad();
         run.record(loss);
       }
       run.record_parameters(maker);
       run.record_parameters(judge);
     }},
    {.what = "a second optimizer for a layer that thaws later", .act = [](Run& run) {
       Net net;
       set_members(net.a, false);
       run.shard_nested(net);
       std::vector<at::Tensor> first = run.parameters(*net.b);
       for (const auto& p : run.parameters(*net.c)) first.push_back(p);
       std::vector<Steps> optimizers = {run.adamw(first)};
       for (int step = 0; step < 5; step++) {
         if (step == 2) {
           set_shards(run, *net.a, true);
           optimizers.push_back(run.adamw(*net.a, 0.01));
         }
         const auto loss = loss_of(run, net, step);
         run.backward(loss);
         for (const auto& optimizer : optimizers) optimizer.step();
         for (const auto& optimizer : optimizers) optimizer.zero_grad();
         run.record(loss);
       }
       run.record_parameters(net);
     }},
    // --- Without flags ---
    {.what = "layers run under `NoGradGuard`, in some steps", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       const auto optimizer = run.adamw(net);
       run.train(net, [&](int step) {
         at::Tensor h;
         {
           const torch::AutoGradMode mode(step % 2 == 0);
           h = torch::tanh(net.b(torch::tanh(net.a(run.batch({4, 5}, step)))));
         }
         return net.c(h).pow(2).mean();
       }, optimizer, 5);
     }},
    {.what = "`h.detach()` between layers, in some steps", .act = [](Run& run) {
       Net net;
       run.shard_nested(net);
       run.train(net, [&](int step) {
         const auto h = torch::tanh(net.a(run.batch({4, 5}, step)));
         return net.c(torch::tanh(net.b(step % 2 == 0 ? h : h.detach()))).pow(2).mean();
       }, run.adamw(net), 5);
     }},
    {.what = "a frozen `BatchNorm1d` in evaluation, the rest trains", .act = [](Run& run) {
       nn::BatchNorm1d norm(7);
       nn::Sequential model(nn::Linear(5, 7), norm, nn::Linear(7, 3));
       fill(*model);
       run.shard_nested(model);
       norm->weight.set_requires_grad(false);
       norm->bias.set_requires_grad(false);
       norm->eval();
       run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(*model));
       run.record(norm->running_mean);
     }},
    {.what = "`tessera::set_requires_grad` on an LSTM, off and on in turns", .act = [](Run& run) {
       nn::LSTM lstm(5, 3);
       nn::Linear head(3, 2);
       nn::ModuleList model(lstm, head);
       fill(*model);
       run.shard_nested(model);
       run.train(*model, [&](int step) {
         set_requires_grad(*lstm, training(step % 2 == 1));
         return head(std::get<0>(lstm(run.batch({4, 2, 5}, step)))).pow(2).mean();
       }, run.adamw(*model), 5);
     }},
  }};
}

}  // namespace tessera::idioms::freezing
