// Programs in which ranks differ: batches, orders, steps that are left out, empty shards, and ranks that part ways.
#include <algorithm>

#include "idiom.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/training.h"

namespace tessera::idioms::ranks {
namespace {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

void learn(const Run& run, const Steps& optimizer, const at::Tensor& loss) {
  run.backward(loss);
  optimizer.step();
  optimizer.zero_grad();
}

void train(Run& run, Mlp& model, const Steps& optimizer) {
  run.train(model, [&](int step) { return loss_of(run, model, step); }, optimizer);
}

/// Leaves out, on this rank, a step that others take.
void leave_out(const Run& run, const Steps& optimizer, nn::Module& model) {
  if (!run.sharded()) return;
  optimizer.ours() != nullptr ? optimizer.ours()->skip_step() : skip_step(model);
}

/// Trains on four batches. In the second one something goes wrong on some rank, and all recover; the plain run leaves that batch out.
void train_with_failure(Run& run, Mlp& model, const std::function<void(int step, bool fails)>& pass) {
  constexpr int kBad = 1;
  const auto optimizer = run.adamw(model);
  for (int step = 0; step < 4; step++) {
    if (step == kBad && !run.sharded()) continue;
    try {
      pass(step, step == kBad);
    } catch (const std::exception&) {
      if (step != kBad) throw;
    }
    if (step == kBad) {
      recover(model);
      continue;
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  run.record_parameters(model);
}

[[noreturn]] void fail() {
  throw std::runtime_error("a bad batch");
}

/// Gives parameters equal values everywhere, so that it does not matter who took a step.
void make_alike(const Run& run, const nn::Module& model) {
  const torch::NoGradGuard no_grad;
  double value = 0.1;
  for (const auto& parameter : run.parameters(model)) {
    parameter.clamp_(value, value);
    value += 0.05;
  }
}

}  // namespace

Chapter chapter() {
  return {
      .title = "Ranks that differ",
      .idioms = {
      {.what = "batches of another size on each rank", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) { return model->forward(run.batch({2 + run.rank(), 6}, step)).pow(2).mean(); };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "an empty batch on one rank", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          const int64_t rows = run.rank() == step % run.ranks() ? 0 : 4;
          return model->forward(run.batch({rows, 6}, step)).pow(2).sum() / 4;
        };
        run.train(*model, loss, run.sgd(*model, 0.02));
       }},
      {.what = "a rank without labels, whose loss is `y.sum() * 0`", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto loss = [&](int step) {
          const auto y = model->forward(run.batch({4, 6}, step));
          return run.rank() == 1 ? y.sum() * 0 : y.pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "losses weighted by how many samples each rank has, agreed on by `all_reduce`", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          const int64_t rows = 1 + (run.rank() + step) % 3;
          auto total = torch::full({}, static_cast<double>(rows));
          run.world().all_reduce(total).wait();
          return model->forward(run.batch({rows, 6}, step)).pow(2).sum() * run.ranks() / total.to(at::kFloat);
        };
        run.train(*model, loss, run.sgd(*model, 0.02));
       }},
      {.what = "a cell in one unit that each rank runs as often as its sequence is long", .act = [](Run& run) {
        nn::GRUCell cell(5, 4);
        fill(*cell);
        run.shard(cell);
        const auto loss = [&](int step) {
          auto h = torch::zeros({2, 4});
          for (int i = 0; i < 2 + run.rank(); i++) h = cell(run.batch({2, 5}, 10 * step + i), h);
          return h.pow(2).mean();
        };
        run.train(*cell, loss, run.adamw(*cell));
       }},
      {.what = "parameters of fewer values than there are ranks", .act = [](Run& run) {
        struct Model : nn::Module {
          at::Tensor scale = register_parameter("scale", torch::full({1}, 0.5));
          at::Tensor shift = register_parameter("shift", torch::full({}, 0.25));
          at::Tensor last = register_parameter("last", values({2, 1}));
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        const auto loss = [&](int step) { return (run.batch({4, 2}, step) * model->scale + model->shift).mm(model->last).pow(2).mean(); };
        run.train(*model, loss, run.adamw(*model));
       }, .remark = "some ranks have an empty shard of them"},
      {.what = "a unit of one value, beside others", .act = [](Run& run) {
        struct Model : Mlp {
          nn::Linear gain = register_module("gain", nn::Linear(nn::LinearOptions(1, 1).bias(false)));
          at::Tensor forward(const at::Tensor& x) { return gain(Mlp::forward(x).view({-1, 1})); }
        };
        const auto model = std::make_shared<Model>();
        fill(*model);
        run.shard_nested(model);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "a parameter without values", .act = [](Run& run) {
        struct Model : Mlp {
          at::Tensor nothing = register_parameter("nothing", torch::zeros({0, 3}));
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        const auto loss = [&](int step) { return loss_of(run, *model, step) + model->nothing.sum(); };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "parameters updated by hand in another order on every other rank", .act = [](Run& run) {
        const auto model = nested(run);
        auto parameters = run.parameters(*model);
        if (run.rank() % 2 == 1) std::reverse(parameters.begin(), parameters.end());
        for (int step = 0; step < 4; step++) {
          const auto loss = loss_of(run, *model, step);
          run.backward(loss);
          {
            const torch::NoGradGuard no_grad;
            for (const auto& parameter : parameters) parameter.sub_(parameter.grad() * 0.1);
          }
          model->zero_grad();
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "two optimizers that step in another order on every other rank", .act = [](Run& run) {
        const auto model = nested(run);
        const auto one = run.adamw(*model->first), other = run.sgd(*model->second);
        for (int step = 0; step < 4; step++) {
          const auto loss = loss_of(run, *model, step);
          run.backward(loss);
          (run.rank() % 2 == 0 ? one : other).step();
          (run.rank() % 2 == 0 ? other : one).step();
          model->zero_grad();
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "gradients dropped on some ranks and set to zero on others", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 4; step++) {
          const auto loss = loss_of(run, *model, step);
          run.backward(loss);
          optimizer.step();
          for (const auto& parameter : run.parameters(*model)) {
            if (run.rank() == 0) {
              parameter.mutable_grad() = at::Tensor();
            } else {
              parameter.mutable_grad().zero_();
            }
          }
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "a step that one rank leaves out with `skip_step`, before weights are made alike", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model, 0.1, /*momentum=*/0);
        for (int step = 0; step < 3; step++) {
          run.backward(loss_of(run, *model, step));
          if (run.rank() == 1) {
            leave_out(run, optimizer, *model);
          } else {
            optimizer.step();
          }
          optimizer.zero_grad();
          make_alike(run, *model);
          run.record(model->forward(run.batch({4, 6}, step)));
        }
        train(run, *model, run.adamw(*model));
       }},
      {.what = "steps that the ranks leave out in turn, in one unit", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto optimizer = run.sgd(*model, 0.1, /*momentum=*/0);
        for (int step = 0; step < 4; step++) {
          run.backward(loss_of(run, *model, step));
          if (run.rank() == step % run.ranks()) {
            leave_out(run, optimizer, *model);
          } else {
            optimizer.step();
          }
          optimizer.zero_grad();
        }
        make_alike(run, *model);
        train(run, *model, run.sgd(*model));
       }},
      {.what = "rank 0 alone reads whole weights, within `full_params` on all ranks", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          {
            const auto whole = full_params(*model);
            const torch::NoGradGuard no_grad;
            if (run.rank() == 0) run.record(model->forward(run.batch({4, 6}, 20)) * model->first->weight.norm());
          }
          return loss_of(run, *model, step);
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "a metric of all ranks by `all_reduce`, between forward and backward", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          const auto value = loss_of(run, *model, step);
          auto mean = value.detach().clone();
          run.world().all_reduce(mean, {.op = Reduce::Mean}).wait();
          run.record(mean);
          return value;
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "training that ends when one rank wants it to, as agreed by `all_reduce`", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        for (int step = 0; step < 10; step++) {
          auto enough = torch::full({}, run.rank() == 1 && step == 3 ? 1.0 : 0.0);
          run.world().all_reduce(enough, {.op = Reduce::Max}).wait();
          if (enough.item<double>() > 0) break;
          learn(run, optimizer, loss_of(run, *model, step));
        }
        run.record_parameters(*model);
       }},
      {.what = "an exception before forward on one rank, which takes its last batch again", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          try {
            if (run.rank() == 0 && step == 2) throw std::runtime_error("broken sample");
            return loss_of(run, *model, step);
          } catch (const std::runtime_error&) {
            return loss_of(run, *model, step - 1);
          }
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "an exception before forward on one rank: `tessera::recover` on all, and on with the next batch", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          if (fails && run.rank() == 1) fail();
          run.backward(loss_of(run, *model, step));
        });
       }},
      {.what = "the same with an exception between two units", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          const auto x = torch::tanh(model->first(run.batch({4, 6}, step)));
          if (fails && run.rank() == 1) fail();
          run.backward(model->second(x).pow(2).mean());
        });
       }},
      {.what = "the same with an exception of each rank at another place", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          if (fails && run.rank() == 1) fail();
          const auto x = torch::tanh(model->first(run.batch({4, 6}, step)));
          if (fails) x.register_hook([](const at::Tensor&) -> at::Tensor { fail(); });
          run.backward(model->second(x).pow(2).mean());
        });
       }},
      {.what = "an exception in the very first forward on one rank: `tessera::recover` on all", .act = [](Run& run) {
        const auto model = nested(run);
        if (run.sharded()) {
          try {
            if (run.rank() == 1) fail();
            (void)model->forward(run.batch({4, 6}, 7));
          } catch (const std::exception&) {
          }
          recover(*model);
        }
        train(run, *model, run.adamw(*model));
       }},
      {.what = "an exception in evaluation on one rank: `tessera::recover` on all", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          const torch::AutoGradMode mode(!fails);
          if (fails && run.rank() == 1) fail();
          const auto loss = loss_of(run, *model, step);
          if (!fails) run.backward(loss);
        });
       }},
      {.what = "an exception inside of `no_sync` on one rank: `tessera::recover` on all, inside of it too", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          if (!fails) return run.backward(loss_of(run, *model, step));
          const auto guard = no_sync(*model);
          try {
            const auto x = torch::tanh(model->first(run.batch({4, 6}, step)));
            if (run.rank() == 1) fail();
            model->second(x).pow(2).mean().backward();
          } catch (const std::exception&) {
          }
          recover(*model);
        });
       }},
      {.what = "an exception after passes inside of `no_sync`, whose gradients are dropped", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          if (fails) {
            const auto guard = no_sync(*model);
            loss_of(run, *model, 5).backward();
          }
          if (fails && run.rank() == 1) fail();
          run.backward(loss_of(run, *model, step));
        });
       }},
      {.what = "a collective that one rank can't take part in, in the middle of a pass: `tessera::recover` on all", .act = [](Run& run) {
        const auto model = nested(run);
        train_with_failure(run, *model, [&](int step, bool fails) {
          const auto loss = loss_of(run, *model, step);
          if (fails) run.world().broadcast(loss.detach(), run.rank() == 1 ? 99 : 0).wait();
          run.backward(loss);
        });
       }},
      {.what = "the same batches on every rank, as a sampler gives them that does not know ranks", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) { return model->forward(values({4, 6}, step)).pow(2).mean(); }, run.sgd(*model), 24);
       }, .within = 1e-6, .because = "torch's mean over three equal values is rounded otherwise", .remark = "rank 0 warns, once"},
      {.what = "other weights on every rank at first, with `Start::FromRank0`", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        {
          const torch::NoGradGuard no_grad;
          for (auto& parameter : model->parameters()) parameter.add_(run.sharded() ? 0.1 * run.rank() : 0);
        }
        run.shard_nested(model, {.mesh = run.world(), .start = Start::FromRank0});
        train(run, *model, run.adamw(*model));
       }},
      {.what = "other weights on every rank at first, without it", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        {
          const torch::NoGradGuard no_grad;
          model->first->bias.add_(run.rank());
        }
        run.shard_nested(model);
        train(run, *model, run.adamw(*model));
       }, .refused = "brought different parameters"},
      {.what = "another number of micro-batches on one rank", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        for (int step = 0; step < 3; step++) {
          if (run.rank() == 1) run.backward(loss_of(run, *model, step + 10));
          learn(run, optimizer, loss_of(run, *model, step));
        }
       }, .refused = "wait for each other", .gathered = "ranks disagree"},
      {.what = "`zero_grad` on rank 0 alone", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 3; step++) {
          run.backward(loss_of(run, *model, step));
          optimizer.step();
          if (run.rank() == 0) optimizer.zero_grad();
        }
       }, .refused = "call zero_grad() on every rank or on none"},
      {.what = "gradients set to zero on rank 1 alone", .act = [](Run& run) {
        const auto model = one_unit(run);
        for (int step = 0; step < 3; step++) {
          run.backward(loss_of(run, *model, step));
          for (const auto& parameter : run.parameters(*model)) {
            if (run.rank() == 1) parameter.mutable_grad().zero_();
          }
        }
       }, .refused = "call zero_grad() on every rank or on none"},
      {.what = "gradients halved on all ranks between the passes that add them up", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 4; step++) {
          run.backward(loss_of(run, *model, step));
          if (step % 2 == 1) {
            optimizer.step();
            optimizer.zero_grad();
          } else {
            for (const auto& parameter : run.parameters(*model)) parameter.mutable_grad().mul_(0.5);
          }
        }
        run.record_parameters(*model);
       }},
      {.what = "a batch more on rank 0", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        for (int step = 0; step < (run.rank() == 0 ? 4 : 3); step++) learn(run, optimizer, loss_of(run, *model, step));
       }, .refused = "give all ranks the same number of them (data::Tail)"},
      {.what = "a branch of the model for each rank, in the first pass", .act = [](Run& run) {
        const auto model = nested(run);
        const auto x = run.batch({4, 6});
        const auto y = run.rank() == 0 ? model->first(x).sum() : model->second(x.narrow(1, 0, 5)).sum();
        run.backward(y);
       }, .refused = "tessera::UnusedParameters::Zeros"},
      {.what = "a first read of a member on rank 0 alone", .act = [](Run& run) {
        const auto model = nested(run);
        if (run.rank() == 0) (void)model->second->weight.norm().item<double>();
        run.world().barrier();
       }, .refused = "make the first read of a member"},
      {.what = "`full_parameter` on rank 0 alone", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        learn(run, optimizer, loss_of(run, *model, 0));
        if (run.rank() == 0) (void)full_parameter(model->first->weight);
        run.world().barrier();
       }, .refused = "rank 0 called tessera::full_parameter"},
      {.what = "`full_state` on rank 1 alone", .act = [](Run& run) {
        const auto model = one_unit(run);
        if (run.rank() == 1) (void)full_state(*model);
        run.world().barrier();
       }, .refused = "rank 1 called tessera::full_state"},
      {.what = "`full_params` on rank 0 alone", .act = [](Run& run) {
        const auto model = nested(run);
        if (run.rank() == 0) (void)full_params(*model, Access::Read);
        run.world().barrier();
       }, .refused = "rank 0 called tessera::full_params"},
      {.what = "the norm of the gradients on rank 0 alone", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        run.backward(loss_of(run, *model, 0));
        if (run.rank() == 0) (void)grad_norm(run.parameters(*model));
        run.world().barrier();
       }, .refused = "rank 0 called tessera::grad_norm"},
      {.what = "a unit that one rank does not use", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 3; step++) {
          const auto x = run.batch({4, 6}, step);
          learn(run, optimizer, (run.rank() == 1 ? model->first(x) : model->forward(x)).pow(2).mean());
        }
       }, .refused = "ranks disagree"},
      {.what = "a step after a pass in which one rank used no unit at all, with `UnusedParameters::Zeros`", .act = [](Run& run) {
        const auto model = one_unit(run, {.mesh = run.world(), .schedule = {.unused_parameters = UnusedParameters::Zeros}});
        optim::SGD optimizer(run.parameters(*model), {.lr = 0.1});
        for (int step = 0; step < 2; step++) {
          if (run.rank() != 0 || step > 0) run.backward(loss_of(run, *model, step));
          optimizer.step();
          optimizer.zero_grad();
        }
       }, .refused = "a step without gradients", .remark = "add `0 * loss` of some batch"},
      {.what = "parameters of a unit that one rank does not use", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 3; step++) {
          const auto x = run.batch({4, 6}, step);
          learn(run, optimizer, (run.rank() == 1 ? model->first(x) : model->forward(x)).pow(2).mean());
        }
       }, .refused = "without second.weight, second.bias"},
      {.what = "units that the ranks use in different orders", .act = [](Run& run) {
        const auto one = std::make_shared<nn::LinearImpl>(5, 5), other = std::make_shared<nn::LinearImpl>(5, 5);
        for (const auto& layer : {one, other}) {
          fill(*layer);
          run.shard(layer);
        }
        auto x = run.batch({4, 5});
        x = (run.rank() == 0 ? one : other)->forward(x);
        x = (run.rank() == 0 ? other : one)->forward(x);
        run.backward(x.pow(2).mean());
       }, .refused = "ranks disagree"},
      {.what = "a forward pass on rank 0 alone, while the others go on to a barrier", .act = [](Run& run) {
        const auto model = nested(run);
        const torch::NoGradGuard no_grad;
        if (run.rank() == 0) (void)model->forward(run.batch({4, 6}));
        run.world().barrier();
       }, .refused = "ranks disagree"},
      {.what = "an optimizer over a part of the model on one rank", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.rank() == 1 ? run.adamw(*model->first) : run.adamw(*model);
        for (int step = 0; step < 4; step++) {
          run.backward(loss_of(run, *model, step));
          optimizer.step();
          model->zero_grad();
        }
       }, .refused = "wait for each other", .gathered = "ranks disagree"},
      {.what = "a step that one rank leaves out without saying so", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 4; step++) {
          run.backward(loss_of(run, *model, step));
          if (run.rank() != 1 || step != 1) optimizer.step();
          optimizer.zero_grad();
        }
       }, .refused = "wait for each other", .gathered = "ranks disagree", .remark = "`skip_step` says so"},
      {.what = "a backward pass that one rank leaves out, before a step of `torch::optim`", .act = [](Run& run) {
        const auto model = nested(run);
        const Steps optimizer(std::make_unique<torch::optim::SGD>(run.parameters(*model), torch::optim::SGDOptions(0.1)));
        for (int step = 0; step < 4; step++) {
          const auto loss = loss_of(run, *model, step);
          if (run.rank() != 1 || step != 1) run.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
        }
       }, .refused = "rank 1 has left the group", .gathered = "ranks disagree",
       .remark = "where ranks share parameters, that rank is one batch ahead until it has no more"},
      {.what = "a backward pass that one rank leaves out, before a step of Tessera's", .act = [](Run& run) {
        const auto model = nested(run);
        optim::SGD optimizer(run.parameters(*model), {.lr = 0.1});
        for (int step = 0; step < 4; step++) {
          const auto loss = loss_of(run, *model, step);
          if (run.rank() != 1 || step != 1) run.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
        }
       }, .refused = "a step without gradients"},
      {.what = "a rank that leaves training early", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        for (int step = 0; step < 4 - run.rank(); step++) learn(run, optimizer, loss_of(run, *model, step));
       }, .refused = "has left the group"},
      {.what = "a layer that only one rank freezes", .act = [](Run& run) {
        const auto model = nested(run);
        if (run.rank() == 1) set_requires_grad(*model->first, Training::Frozen);
        train(run, *model, run.adamw(*model));
       }, .refused = "wait for each other", .gathered = "ranks disagree"},
      {.what = "a rank that ends with an exception of the program's", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 4; step++) {
          if (run.rank() == 1 && step == 2) throw std::runtime_error("no such file: shard 17");
          learn(run, optimizer, loss_of(run, *model, step));
        }
       }, .refused = "no such file: shard 17", .remark = "the others are woken with an error that names the rank"},
      }};
}

}  // namespace tessera::idioms::ranks
