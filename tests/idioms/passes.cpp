// How programs go through a model: evaluation, accumulation, several models, other orders, passes that fail.
#include <c10/core/InferenceMode.h>

#include <thread>

#include "idiom.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unsharding.h"

namespace tessera::idioms::passes {
namespace {

namespace nn = torch::nn;

struct Blocks : nn::Module {
  std::vector<nn::Linear> block;
  explicit Blocks(int count = 3) {
    for (int i = 0; i < count; i++) block.push_back(register_module("block" + std::to_string(i), nn::Linear(5, 5)));
    fill(*this);
  }
  at::Tensor part(size_t i, const at::Tensor& x) { return torch::tanh(block[i](x)); }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < block.size(); i++) x = part(i, x);
    return x;
  }
};

at::Tensor input_of(const Run& run, int step) {
  return run.batch({4, 5}, step);
}

at::Tensor loss_of(const Run& run, Blocks& model, int step) {
  return model.forward(input_of(run, step)).pow(2).mean();
}

void train(Run& run, Blocks& model, const Steps& optimizer) {
  run.train(model, [&](int step) { return loss_of(run, model, step); }, optimizer);
}

/// One step, with whatever gradients there are.
void step(const Steps& optimizer) {
  optimizer.step();
  optimizer.zero_grad();
}

void learn(const Run& run, const Steps& optimizer, const at::Tensor& loss) {
  run.backward(loss);
  step(optimizer);
}

void train_to_depths(Run& run, Blocks& model, const Steps& optimizer) {
  for (const int depth : {4, 2, 3, 1, 4}) {
    auto x = input_of(run, depth);
    for (int k = 0; k < depth; k++) x = model.part(static_cast<size_t>(k), x);
    run.backward(x.pow(2).mean());
    run.record_gradients(run.parameters(model));
    step(optimizer);
  }
  run.record_parameters(model);
}

}  // namespace

Chapter chapter() {
  return {
      .title = "Passes",
      .idioms = {
      {.what = "an evaluation under `NoGradGuard` after each step", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 4; i++) {
          learn(run, optimizer, loss_of(run, *model, i));
          const torch::NoGradGuard no_grad;
          model->eval();
          run.record(model->forward(input_of(run, 20)));
          model->train();
        }
       }},
      {.what = "an evaluation in `InferenceMode` after each step", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard(model);
        const auto optimizer = run.sgd(*model);
        for (int i = 0; i < 4; i++) {
          learn(run, optimizer, loss_of(run, *model, i));
          const c10::InferenceMode inference;
          run.record(model->forward(input_of(run, 20)).mul(2));
        }
       }},
      {.what = "evaluations with gradients on, whose graphs are dropped", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto loss = [&](int i) {
          for (int more = 0; more <= i; more++) run.record(loss_of(run, *model, 10 + more));
          return loss_of(run, *model, i);
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "an evaluation between forward and backward", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto loss = [&](int i) {
          const auto value = loss_of(run, *model, i);
          const torch::NoGradGuard no_grad;
          run.record(model->forward(input_of(run, 20)));
          return value;
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "gradients accumulated over three micro-batches", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 3; i++) {
          for (int micro = 0; micro < 3; micro++) run.backward(loss_of(run, *model, 3 * i + micro) / 3);
          run.record_gradients(run.parameters(*model));
          step(optimizer);
        }
        run.record_parameters(*model);
       }},
      {.what = "another number of micro-batches in each step, the same on all ranks", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard(model);
        const auto optimizer = run.sgd(*model);
        int number = 0;
        for (const int count : {1, 3, 2, 1}) {
          for (int micro = 0; micro < count; micro++) learn(run, optimizer, loss_of(run, *model, number++));
          run.record_parameters(*model);
        }
       }},
      {.what = "several forward passes before one backward pass over their sum", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto loss = [&](int i) {
          auto sum = loss_of(run, *model, i);
          for (int more = 1; more < 3; more++) sum = sum + loss_of(run, *model, i + 5 * more);
          return sum;
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "two forward passes, then their backward passes in the other order", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.sgd(*model);
        for (int i = 0; i < 3; i++) {
          const auto one = loss_of(run, *model, i), other = loss_of(run, *model, i + 5);
          run.backward(other);
          run.backward(one);
          step(optimizer);
          run.record(one - other);
        }
        run.record_parameters(*model);
       }},
      {.what = "two inputs through one encoder (Siamese), and the distance of the outputs", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard(model);
        const auto loss = [&](int i) {
          return (model->forward(input_of(run, i)) - model->forward(input_of(run, i + 7))).pow(2).sum(1).add(1e-3).sqrt().mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "one block used four times in a pass, between others", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto loss = [&](int i) {
          auto x = model->part(0, input_of(run, i));
          for (int again = 0; again < 4; again++) x = model->part(2, model->part(1, x));
          return x.pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "two models trained in turn", .act = [](Run& run) {
        const auto one = std::make_shared<Blocks>(), other = std::make_shared<Blocks>(2);
        run.shard_nested(one);
        run.shard(other);
        const auto first = run.adamw(*one), second = run.sgd(*other);
        for (int i = 0; i < 3; i++) {
          learn(run, first, loss_of(run, *one, i));
          learn(run, second, loss_of(run, *other, i + 1));
        }
        run.record_parameters(*one);
        run.record_parameters(*other);
       }},
      {.what = "blocks of two models that take turns in one graph", .act = [](Run& run) {
        const auto one = std::make_shared<Blocks>(2), other = std::make_shared<Blocks>(2);
        run.shard_nested(one);
        run.shard(other);
        const auto first = run.adamw(*one), second = run.adamw(*other);
        for (int i = 0; i < 3; i++) {
          const auto x = input_of(run, i);
          const auto loss = (one->part(1, other->part(0, one->part(0, x))) * other->part(1, one->part(0, x))).mean();
          learn(run, second, loss);
          step(first);
          run.record(loss);
        }
        run.record_parameters(*one);
        run.record_parameters(*other);
       }},
      {.what = "distillation from a sharded teacher that is frozen", .act = [](Run& run) {
        const auto teacher = std::make_shared<Blocks>(4), student = std::make_shared<Blocks>(2);
        for (auto& parameter : teacher->parameters()) parameter.set_requires_grad(false);
        run.shard_nested(teacher);
        run.shard_nested(student);
        const auto loss = [&](int i) {
          const auto x = input_of(run, i);
          return (student->forward(x) - teacher->forward(x)).pow(2).mean();
        };
        run.train(*student, loss, run.adamw(*student));
        run.record_parameters(*teacher);
       }},
      {.what = "layers used in another order in every step", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>(3);
        run.shard_nested(model);
        const auto loss = [&](int i) {
          auto x = input_of(run, i);
          for (size_t k = 0; k < 3; k++) x = model->part((static_cast<size_t>(i) * 2 + k) % 3, x);
          return x.pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model), 5);
       }},
      {.what = "early exit: how many layers are used changes from step to step", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>(4);
        run.shard_nested(model);
        train_to_depths(run, *model, run.sgd(*model));
       }},
      {.what = "early exit within one unit: some of its parameters get no gradient", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>(4);
        run.shard(model);
        train_to_depths(run, *model, run.adamw(*model));
       }},
      {.what = "an input of the wrong shape: all ranks catch the exception and go on", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        int failed = 0;
        for (int i = 0; i < 5; i++) {
          try {
            const auto x = i % 2 == 1 ? run.batch({4, 3}, i) : input_of(run, i);
            const auto loss = model->forward(model->part(0, x)).pow(2).mean();
            learn(run, optimizer, loss);
            run.record(loss);
          } catch (const c10::Error&) {
            failed++;
          }
        }
        run.record(failed);
        run.record_parameters(*model);
       }},
      {.what = "an exception after forward on all ranks: the graph is dropped, the next batch trains", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.sgd(*model);
        for (int i = 0; i < 4; i++) {
          try {
            const auto loss = loss_of(run, *model, i);
            if (i == 1) throw std::runtime_error("no label");
            learn(run, optimizer, loss);
            run.record(loss);
          } catch (const std::runtime_error&) {
            run.record(-1);
          }
        }
        run.record_parameters(*model);
       }},
      {.what = "an exception in a hook in the middle of backward, on all ranks", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 4; i++) {
          const auto h = model->part(0, input_of(run, i));
          if (i == 1) h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in the middle"); });
          const auto loss = model->part(2, model->part(1, h)).pow(2).mean();
          try {
            learn(run, optimizer, loss);
          } catch (const std::exception&) {
            optimizer.zero_grad();
          }
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "an exception in backward on one rank: `tessera::recover` on all, and on with the next batch", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 4; i++) {
          const bool fails = i == 1;
          if (fails && !run.sharded()) continue;  // the plain run leaves this batch out
          const auto h = model->part(0, input_of(run, i));
          if (fails && run.rank() == 0) {
            h.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("on one rank"); });
          }
          const auto loss = model->part(2, model->part(1, h)).pow(2).mean();
          try {
            run.backward(loss);
          } catch (const std::exception&) {
            if (!fails) throw;
          }
          if (fails) {
            recover(*model);
            continue;
          }
          step(optimizer);
          run.record(loss);
        }
        run.record_parameters(*model);
       }, .remark = "gradients that were accumulated before are dropped, too"},
      {.what = "a batch whose loss is not finite on some rank is left out by all, with `skip_step`", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 4; i++) {
          auto x = input_of(run, i);
          if (i == 2 && run.rank() == 1) x = x / 0;
          const auto loss = model->forward(x).pow(2).mean();
          run.backward(loss);
          auto bad = torch::isfinite(loss).logical_not().to(torch::kFloat);
          run.world().all_reduce(bad).wait();
          if (bad.item<float>() == 0) {
            optimizer.step();
            run.record(loss);
          } else if (run.sharded()) {
            optimizer.ours() != nullptr ? optimizer.ours()->skip_step() : skip_step(*model);
          }
          optimizer.zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "an evaluation in a thread of its own", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.sgd(*model);
        for (int i = 0; i < 3; i++) {
          learn(run, optimizer, loss_of(run, *model, i));
          at::Tensor y;
          std::thread([&] {
            const torch::NoGradGuard no_grad;
            y = model->forward(input_of(run, 20));
          }).join();
          run.record(y);
        }
       }},
      {.what = "three threads that evaluate one model at once, within `tessera::full_params`", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 3; i++) {
          learn(run, optimizer, loss_of(run, *model, i));
          std::vector<at::Tensor> y(3);
          {
            const auto whole = full_params(*model);
            std::vector<std::thread> threads;
            for (int k = 0; k < 3; k++) {
              threads.emplace_back([&, k] {
                const torch::NoGradGuard no_grad;
                y[static_cast<size_t>(k)] = model->forward(input_of(run, 20 + k));
              });
            }
            for (auto& thread : threads) thread.join();
          }
          for (const auto& one : y) run.record(one);
        }
       }},
      {.what = "forward in one thread, backward in another", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int i = 0; i < 3; i++) {
          at::Tensor loss;
          std::thread([&] { loss = loss_of(run, *model, i); }).join();
          learn(run, optimizer, loss);
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "a new model for each fold, built, sharded, trained and dropped in a loop", .act = [](Run& run) {
        std::vector<std::shared_ptr<Blocks>> kept;
        for (int fold = 0; fold < 3; fold++) {
          const auto model = std::make_shared<Blocks>(1 + fold);
          run.shard_nested(model);
          train(run, *model, run.adamw(*model));
          if (!run.sharded()) kept.push_back(model);  // the plain run goes through all models that it was given
        }
       }},
      {.what = "`backward` after an optimizer step that changed the graph's weights", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.sgd(*model);
        const auto late = loss_of(run, *model, 1);
        run.backward(loss_of(run, *model, 0));
        optimizer.step();
        run.backward(late);
       }, .refused = "modified by an inplace operation", .remark = "as plain libtorch refuses it"},
      {.what = "units handled by hand at a root that has no parameters of its own: `unshard`, `reshard`, the setters, lists of prefetches",
       .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard_nested(model);
        const auto optimizer = run.adamw(*model);
        for (int step = 0; step < 3; step++) {
          if (run.sharded()) {
            unshard(*model).wait();
            set_reshard_after_forward(*model, step == 1, Recurse::No);
            set_reshard_after_backward(*model, step == 1 ? ReshardAfterBackward::Yes : ReshardAfterBackward::No, Recurse::No);
            const std::vector<std::shared_ptr<nn::Module>> all = {model, model->block[1].ptr()};
            set_modules_to_forward_prefetch(*model, all);
            set_modules_to_forward_prefetch(*model->block[0], all);
            set_modules_to_backward_prefetch(*model->block[2], all);
          }
          const auto loss = loss_of(run, *model, step);
          if (run.sharded()) reshard(*model);
          learn(run, optimizer, loss);
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "`unshard` of a module that is only a part of a unit", .act = [](Run& run) {
        const auto model = std::make_shared<Blocks>();
        run.shard(model);
        unshard(*model->block[0]);
       }, .refused = "no unit was made from module Linear itself"},
      }};
}

}  // namespace tessera::idioms::passes
