// What programs ask of the autograd engine: functions of their own, checkpoints, derivatives of derivatives, several losses.
#include "idiom.h"
#include "tests/testing/checkpoint_by_hand.h"

namespace tessera::idioms::autograd {
namespace {

namespace nn = torch::nn;
namespace ag = torch::autograd;
using testing::checkpoint_by_hand;
using Part = testing::SegmentFunction;

struct ThreeLayers : nn::Module {
  nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  ThreeLayers() {
    first = register_module("first", nn::Linear(6, 5));
    second = register_module("second", nn::Linear(5, 5));
    third = register_module("third", nn::Linear(5, 3));
    fill(*this);
  }
  at::Tensor trunk(const at::Tensor& x) { return torch::tanh(second(torch::tanh(first(x)))); }
  at::Tensor forward(const at::Tensor& x) { return third(trunk(x)); }
};

/// A layer written by hand, which saves its weight for backward.
struct Affine : ag::Function<Affine> {
  static at::Tensor forward(ag::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    context->save_for_backward({x, weight});
    return x.mm(weight.t()) + bias;
  }
  static ag::variable_list backward(ag::AutogradContext* context, ag::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0]), gradients[0].sum(0)};
  }
};

/// The gradient passes as if the weight were the identity, and the weight gets none.
struct OnlyOfInput : ag::Function<OnlyOfInput> {
  static at::Tensor forward(ag::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({weight});
    return x.mm(weight.t());
  }
  static ag::variable_list backward(ag::AutogradContext* context, ag::variable_list gradients) {
    return {gradients[0].mm(context->get_saved_variables()[0]), at::Tensor()};
  }
};

struct ScaledInPlace : ag::Function<ScaledInPlace> {
  static at::Tensor forward(ag::AutogradContext* context, at::Tensor x, const at::Tensor& scale) {
    context->save_for_backward({x.clone(), scale});
    x.mul_(scale);
    context->mark_dirty({x});
    return x;
  }
  static ag::variable_list backward(ag::AutogradContext* context, ag::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

struct Reversed : ag::Function<Reversed> {
  static at::Tensor forward(ag::AutogradContext* /*context*/, const at::Tensor& x) { return x.view_as(x); }
  static ag::variable_list backward(ag::AutogradContext* /*context*/, ag::variable_list gradients) { return {-0.5 * gradients[0]}; }
};

struct SignOf : ag::Function<SignOf> {
  static at::Tensor forward(ag::AutogradContext* /*context*/, const at::Tensor& weight) { return weight.sign(); }
  static ag::variable_list backward(ag::AutogradContext* /*context*/, ag::variable_list gradients) { return {gradients[0].clamp(-1, 1)}; }
};

at::Tensor input_of(const Run& run, int step) {
  return run.batch({4, 6}, step).set_requires_grad(true);
}

/// The usual loop, with a backward pass that the idiom makes itself.
void steps(Run& run, const ThreeLayers& model, const Steps& optimizer, const std::function<at::Tensor(int step)>& pass) {
  for (int step = 0; step < 3; step++) {
    run.record(pass(step));
    run.record_gradients(run.parameters(model));
    optimizer.step();
    optimizer.zero_grad();
  }
  run.record_parameters(model);
}

const std::string kSeveralGraphs = "the means over the ranks are added graph by graph";

}  // namespace

Chapter chapter() {
  return {
      .title = "Autograd",
      .idioms = {
      {.what = "a layer that is a `torch::autograd::Function` and saves its weight", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto h = Affine::apply(run.batch({4, 6}, step), model->first->weight, model->first->bias);
          return model->third(torch::tanh(Affine::apply(torch::tanh(h), model->second->weight, model->second->bias))).pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "a `torch::autograd::Function` that returns no gradient for the weight that it takes", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.adamw(*model), [&](int step) {
          const auto h = torch::tanh(model->first(run.batch({4, 6}, step)));
          const auto loss = model->third(OnlyOfInput::apply(h, model->second->weight) + model->second->bias).pow(2).mean();
          run.backward(loss);
          return loss;
        });
       }},
      {.what = "a `torch::autograd::Function` that scales its input in place by a parameter", .act = [](Run& run) {
        struct Model : ThreeLayers {
          at::Tensor scale = register_parameter("scale", values({5}, 0.4));
          at::Tensor forward(const at::Tensor& x) { return third(ScaledInPlace::apply(trunk(x) * 1, scale)); }
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "binary weights by a straight-through `torch::autograd::Function`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto h = torch::tanh(torch::linear(run.batch({4, 6}, step), SignOf::apply(model->first->weight), model->first->bias));
          return torch::linear(h, SignOf::apply(model->third->weight)).pow(2).mean() + 0 * model->second(h).sum();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "a straight-through estimator by `w + (w.round() - w).detach()`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard(model);
        const auto rounded = [](const at::Tensor& w) { return w + ((w * 4).round() / 4 - w).detach(); };
        const auto loss = [&](int step) {
          const auto h = torch::tanh(torch::linear(run.batch({4, 6}, step), rounded(model->first->weight), model->first->bias));
          return model->third(torch::tanh(torch::linear(h, rounded(model->second->weight), model->second->bias))).pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "gradient reversal between a trunk and one of its heads", .act = [](Run& run) {
        struct Model : ThreeLayers {
          nn::Linear domain{nullptr};
          Model() {
            domain = register_module("domain", nn::Linear(5, 2));
            fill(*this);
          }
        };
        const auto model = std::make_shared<Model>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto h = model->trunk(run.batch({4, 6}, step));
          return model->third(h).pow(2).mean() + model->domain(Reversed::apply(h)).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "a checkpointed block that is a unit", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto h = model->first(run.batch({4, 6}, step));
          return model->third(checkpoint_by_hand([&](const at::Tensor& x) { return torch::tanh(model->second(x)); }, h)).pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "checkpoints around all of a model that is one unit, over inputs that need no gradient", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard(model);
        const auto loss = [&](int step) {
          return checkpoint_by_hand([&](const at::Tensor& x) { return model->forward(x); }, run.batch({4, 6}, step)).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "checkpoints inside of checkpoints", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const Part inner = [&](const at::Tensor& x) { return torch::tanh(model->second(x)); };
        const Part outer = [&](const at::Tensor& x) { return model->third(checkpoint_by_hand(inner, torch::tanh(model->first(x)))); };
        run.train(*model, [&](int step) { return checkpoint_by_hand(outer, input_of(run, step)).pow(2).mean(); }, run.adamw(*model));
       }},
      {.what = "a block that is checkpointed twice in one pass", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const Part block = [&](const at::Tensor& x) { return torch::tanh(model->second(x)); };
        const auto loss = [&](int step) {
          return model->third(checkpoint_by_hand(block, checkpoint_by_hand(block, model->first(run.batch({4, 6}, step))))).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }, .within = 1e-5, .because = kSeveralGraphs},
      {.what = "a gradient penalty: the norm of the gradient with respect to inputs, in the loss", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto x = input_of(run, step);
          const auto energy = model->forward(x).pow(2).sum();
          const auto slope = ag::grad({energy}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
          return energy + (slope.norm(2, 1) - 1).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model, 0.01));
       }},
      {.what = "a loss over nothing but derivatives with respect to inputs", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard(model);
        const auto loss = [&](int step) {
          const auto x = input_of(run, step);
          const auto force = ag::grad({model->forward(x).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
          return (force - run.batch({4, 6}, step + 10)).pow(2).mean() + 0 * model->third->bias.sum();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "a product of the Hessian with respect to inputs and a vector", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        for (int step = 0; step < 3; step++) {
          const auto x = input_of(run, step);
          const auto slope = ag::grad({model->forward(x).pow(2).sum()}, {x}, {}, true, true)[0];
          run.record(ag::grad({slope}, {x}, {run.batch({4, 6}, step + 5)})[0]);
        }
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.adamw(*model));
       }},
      {.what = "attacks on inputs: `x.grad()` after backward, then training on the changed inputs", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto x = input_of(run, step);
          const auto slope = ag::grad({model->forward(x).pow(2).mean()}, {x})[0];
          run.record(slope);
          return model->forward(x.detach() + 0.1 * slope.sign()).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "`grad()` with respect to parameters, whose result is put into `.grad`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto parameters = run.parameters(*model);
        const auto optimizer = run.adamw(parameters);
        for (int step = 0; step < 3; step++) {
          run.backward([&] {
            const auto gradients = ag::grad({model->forward(run.batch({4, 6}, step)).pow(2).mean()}, parameters);
            for (size_t i = 0; i < parameters.size(); i++) parameters[i].mutable_grad() = gradients[i];
          });
          run.record_gradients(parameters);
          optimizer.step();
          optimizer.zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "backward with respect to some of the parameters only", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard(model);
        const auto parameters = run.parameters(*model);
        const std::vector<at::Tensor> chosen = {parameters[0], parameters[3]};
        steps(run, *model, run.sgd(*model), [&](int step) {
          const auto loss = model->forward(run.batch({4, 6}, step)).pow(2).mean();
          run.backward([&] { loss.backward({}, std::nullopt, false, chosen); });
          return loss;
        });
       }},
      {.what = "two backward passes through one graph, with `retain_graph`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.sgd(*model), [&](int step) {
          const auto loss = model->forward(run.batch({4, 6}, step)).pow(2).mean();
          run.backward([&] { loss.backward({}, /*retain_graph=*/true); });
          run.backward(loss);
          return loss;
        });
       }},
      {.what = "two losses over one trunk, with a backward pass for each", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.adamw(*model), [&](int step) {
          const auto h = model->trunk(run.batch({4, 6}, step));
          const auto one = model->third(h).pow(2).mean(), other = h.abs().mean();
          run.backward([&] { one.backward({}, /*retain_graph=*/true); });
          run.backward(other);
          return one + other;
        });
       }},
      {.what = "backward from several roots at once, each with a gradient of its own", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard(model);
        steps(run, *model, run.sgd(*model), [&](int step) {
          const auto h = model->trunk(run.batch({4, 6}, step));
          const auto y = model->third(h);
          run.backward([&] { ag::backward({h, y}, {values({4, 5}, step), values({4, 3}, step + 1)}); });
          return y;
        });
       }},
      {.what = "`detach()` between trunk and head: the trunk gets no gradients", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.adamw(*model), [&](int step) {
          const auto loss = model->third(model->trunk(run.batch({4, 6}, step)).detach()).pow(2).mean();
          run.backward(loss);
          return loss;
        });
       }},
      {.what = "a target that is computed without gradients by the model that is trained", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          at::Tensor target;
          {
            const torch::NoGradGuard no_grad;
            target = run.batch({4, 3}, step) + 0.9 * model->forward(run.batch({4, 6}, step + 1));
          }
          return (model->forward(run.batch({4, 6}, step)) - target).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "a weight used once as it is and once detached", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard(model);
        const auto loss = [&](int step) {
          const auto h = model->trunk(run.batch({4, 6}, step));
          return (model->third(h) * torch::linear(h, model->third->weight.detach())).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "a penalty over the modules' own weights in the loss", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto loss = [&](int step) {
          const auto penalty = model->first->weight.norm() + model->second->weight.abs().sum() + model->third->weight.pow(2).mean();
          return model->forward(run.batch({4, 6}, step)).pow(2).mean() + 0.01 * penalty;
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "backward under `NoGradGuard`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.sgd(*model), [&](int step) {
          const auto loss = model->forward(run.batch({4, 6}, step)).pow(2).mean();
          const torch::NoGradGuard no_grad;
          run.backward(loss);
          return loss;
        });
       }},
      {.what = "`backward` with `create_graph`, and steps by the gradients", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.adamw(*model), [&](int step) {
          const auto loss = model->forward(run.batch({4, 6}, step)).pow(2).mean();
          run.backward([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
          return loss;
        });
       }},
      {.what = "a gradient penalty by `x.grad()` after `backward` with `create_graph`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        steps(run, *model, run.sgd(*model, 0.01), [&](int step) {
          const auto x = input_of(run, step);
          const auto energy = model->forward(x).pow(2).sum();
          run.backward([&] { energy.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
          const auto penalty = (x.grad().norm(2, 1) - 1).pow(2).mean();
          run.backward(penalty);
          return energy + penalty;
        });
       }},
      {.what = "a product of the Hessian with respect to parameters and a vector", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto parameters = run.parameters(*model);
        const auto loss = model->forward(run.batch({4, 6})).pow(2).mean();
        const auto gradients = ag::grad({loss}, parameters, {}, /*retain_graph=*/true, /*create_graph=*/true);
        std::vector<at::Tensor> vectors;
        for (const auto& gradient : gradients) vectors.push_back(torch::ones_like(gradient));
        ag::grad(gradients, parameters, vectors);
       }, .refused = "can be differentiated again", .remark = "with respect to inputs it works"},
      {.what = "`p.grad()` in the next loss, after `backward` with `create_graph`", .act = [](Run& run) {
        const auto model = std::make_shared<ThreeLayers>();
        run.shard_nested(model);
        const auto parameters = run.parameters(*model);
        run.backward([&] { model->forward(run.batch({4, 6})).pow(2).mean().backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
        std::vector<at::Tensor> squares, vectors;
        for (const auto& parameter : parameters) squares.push_back(parameter.grad() * parameter.grad());
        for (const auto& square : squares) vectors.push_back(torch::ones_like(square));
        ag::backward(squares, vectors);
       }, .refused = "can be differentiated again"},
      }};
}

}  // namespace tessera::idioms::autograd
