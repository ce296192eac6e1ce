// Optimizers: torch's, Tessera's and those that programs write by hand; groups, several of them, averages of weights.
#include <torch/optim/schedulers/step_lr.h>

#include "idiom.h"
#include "tessera/optim/adagrad.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/lamb.h"
#include "tessera/optim/lion.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/rebind.h"
#include "tessera/shard/reduction.h"

namespace tessera::idioms::optimizers {
namespace {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

void train(Run& run, Mlp& model, const Steps& optimizer) {
  run.train(model, [&](int step) { return loss_of(run, model, step); }, optimizer);
}

/// The loop of an optimizer that is written by hand: the update sees each parameter with its gradient and its place in the list.
using Update = std::function<void(const at::Tensor& parameter, const at::Tensor& gradient, size_t index)>;
void train_by_hand(Run& run, Mlp& model, const Update& update) {
  for (int step = 0; step < 4; step++) {
    const auto loss = loss_of(run, model, step);
    run.backward(loss);
    const torch::NoGradGuard no_grad;
    const auto parameters = run.parameters(model);
    for (size_t i = 0; i < parameters.size(); i++) update(parameters[i], parameters[i].grad(), i);
    model.zero_grad();
    run.record(loss);
  }
  run.record_parameters(model);
}

/// The usual loop, with something before and after each step.
void train_around(Run& run, Mlp& model, const Steps& optimizer, const std::function<void()>& before,
                  const std::function<void()>& after = {}) {
  for (int step = 0; step < 4; step++) {
    const auto loss = loss_of(run, model, step);
    run.backward(loss);
    if (before) before();
    optimizer.step();
    optimizer.zero_grad();
    const torch::NoGradGuard no_grad;
    if (after) after();
    run.record(loss);
  }
  run.record_parameters(model);
}

Tensors copies(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

struct Group {
  Tensors parameters;
  double lr, weight_decay;
};
Steps adamw_of(const Run& run, const std::vector<Group>& groups) {
  if (run.setting().optimizer == By::Tessera) {
    std::vector<optim::ParameterGroup> own;
    for (const auto& group : groups) own.push_back({.parameters = group.parameters, .lr = group.lr, .weight_decay = group.weight_decay});
    return Steps(std::make_unique<optim::AdamW>(own, optim::AdamWOptions{}));
  }
  std::vector<torch::optim::OptimizerParamGroup> own;
  for (const auto& group : groups) {
    own.emplace_back(group.parameters, std::make_unique<torch::optim::AdamWOptions>(
                                           torch::optim::AdamWOptions(group.lr).weight_decay(group.weight_decay)));
  }
  return Steps(std::make_unique<torch::optim::AdamW>(own, torch::optim::AdamWOptions()));
}

/// Tessera's or torch's optimizer of one rule, as the setting says.
template <class Ours, class Theirs, class OurOptions, class TheirOptions>
Steps either(const Run& run, const nn::Module& model, const OurOptions& ours, const TheirOptions& theirs) {
  if (run.setting().optimizer == By::Tessera) return Steps(std::make_unique<Ours>(run.parameters(model), ours));
  return Steps(std::make_unique<Theirs>(run.parameters(model), theirs));
}

void set_lr(const Steps& optimizer, double lr) {
  if (optimizer.ours() != nullptr) return optimizer.ours()->set_lr(lr);
  for (auto& group : optimizer.theirs()->param_groups()) group.options().set_lr(lr);
}

/// A generator and a critic, and the losses that they have of each other.
struct Gan : nn::Module {
  std::shared_ptr<Mlp> generator = register_module("generator", std::make_shared<Mlp>());
  nn::Linear critic = register_module("critic", nn::Linear(3, 1));
  Gan() { fill(*this); }
  at::Tensor score(const at::Tensor& x) { return critic(x).sigmoid().mean(); }
};
void train_gan(Run& run, Gan& gan) {
  const auto of_critic = run.adamw(*gan.critic), of_generator = run.adamw(*gan.generator);
  for (int step = 0; step < 3; step++) {
    const auto fake = gan.generator->forward(run.batch({4, 6}, step));
    const auto of_c = gan.score(fake.detach()) - gan.score(run.batch({4, 3}, step));
    run.backward(of_c);
    of_critic.step();
    gan.zero_grad();
    const auto of_g = -gan.score(gan.generator->forward(run.batch({4, 6}, step)));
    run.backward(of_g);
    of_generator.step();
    gan.zero_grad();
    run.record(of_c + of_g);
  }
  run.record_parameters(gan);
}

/// A model beside a loss whose weights are in no unit. `average` sees them before each step.
void train_with_loss_of_its_own(Run& run, const std::function<void(const Tensors& weights)>& average) {
  const auto model = nested(run);
  nn::Linear of_loss(3, 2);
  fill(*of_loss);
  const auto optimizer = run.adamw(*model), own = run.sgd(Tensors(of_loss->parameters()));
  for (int step = 0; step < 4; step++) {
    const auto loss = of_loss(model->forward(run.batch({4, 6}, step))).pow(2).mean();
    run.backward(loss);
    average(of_loss->parameters());
    optimizer.step();
    own.step();
    optimizer.zero_grad();
    own.zero_grad();
    run.record(loss);
  }
  run.record_parameters(*model);
  for (const auto& weight : of_loss->parameters()) run.record(weight);
}

const auto kNormRounds = "a norm over shards is added in another order";

}  // namespace

Chapter chapter() {
  return {
      .title = "Optimizers",
      .idioms = {
      {.what = "SGD with Nesterov's momentum and weight decay", .act = [](Run& run) {
        const auto model = nested(run);
        const auto p = run.parameters(*model);
        const auto theirs = torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.05);
        std::unique_ptr<optim::Optimizer> ours(new optim::SGD(p, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .nesterov = true}));
        const bool tessera = run.setting().optimizer == By::Tessera;
        train(run, *model, tessera ? Steps(std::move(ours)) : Steps(std::make_unique<torch::optim::SGD>(p, theirs)));
       }},
      {.what = "Adam with L2 decay", .act = [](Run& run) {
        const auto model = one_unit(run);
        train(run, *model, either<optim::Adam, torch::optim::Adam>(run, *model, optim::AdamOptions{.lr = 0.03, .weight_decay = 0.1},
                                                                   torch::optim::AdamOptions(0.03).weight_decay(0.1)));
       }},
      {.what = "Adagrad", .act = [](Run& run) {
        const auto model = nested(run);
        train(run, *model, either<optim::Adagrad, torch::optim::Adagrad>(run, *model, optim::AdagradOptions{.lr = 0.1, .lr_decay = 0.01},
                                                                         torch::optim::AdagradOptions(0.1).lr_decay(0.01)));
       }},
      {.what = "`torch::optim::RMSprop`, centered and with momentum", .act = [](Run& run) {
        const auto model = nested(run);
        const auto options = torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5);
        train(run, *model, Steps(std::make_unique<torch::optim::RMSprop>(run.parameters(*model), options)));
       }},
      {.what = "`tessera::optim::Lion` over plain and over sharded parameters", .act = [](Run& run) {
        const auto model = nested(run);
        const optim::LionOptions options{.lr = 0.01, .weight_decay = 0.1};
        train(run, *model, Steps(std::make_unique<optim::Lion>(run.parameters(*model), options)));
       }},
      {.what = "`tessera::optim::Lamb` over plain and over sharded parameters", .act = [](Run& run) {
        const auto model = nested(run);
        train(run, *model, Steps(std::make_unique<optim::Lamb>(run.parameters(*model), optim::LambOptions{.lr = 0.01})));
       }, .within = 1e-4, .because = kNormRounds},
      {.what = "two groups: weight decay for what has `dim() >= 2`, none for the rest", .act = [](Run& run) {
        const auto model = nested(run);
        Tensors matrices, others;
        for (const auto& parameter : run.parameters(*model)) (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
        train(run, *model, adamw_of(run, {{matrices, 0.05, 0.5}, {others, 0.05, 0}}));
       }},
      {.what = "groups with rates of their own that cut through one unit", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto p = run.parameters(*model);
        train(run, *model, adamw_of(run, {{{p[3], p[0]}, 0.01, 0.1}, {{p[1]}, 0.1, 0}, {{p[2]}, 0, 0.3}}));
       }},
      {.what = "groups chosen by the names of `named_parameters()`", .act = [](Run& run) {
        const auto model = nested(run);
        Tensors head, trunk;
        for (const auto& item : model->named_parameters()) (item.key().starts_with("second.") ? head : trunk).push_back(item.value());
        train(run, *model, adamw_of(run, {{trunk, 0.01, 0.1}, {head, 0.1, 0}}));
       }},
      {.what = "two optimizers over one unit, of which one steps every other time and keeps gradients", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto p = run.parameters(*model);
        const auto one = run.adamw(Tensors{p[0], p[1]}), other = run.sgd(Tensors{p[2], p[3]});
        for (int step = 0; step < 5; step++) {
          run.backward(loss_of(run, *model, step));
          one.step();
          one.zero_grad();
          if (step % 2 == 1) {
            other.step();
            other.zero_grad();
          }
          run.record_parameters(*model);
        }
       }},
      {.what = "a GAN whose generator and critic are units of their own", .act = [](Run& run) {
        const auto gan = std::make_shared<Gan>();
        run.shard_nested(gan);
        train_gan(run, *gan);
       }},
      {.what = "a GAN in one unit, with two optimizers", .act = [](Run& run) {
        const auto gan = std::make_shared<Gan>();
        run.shard(gan);
        train_gan(run, *gan);
       }},
      {.what = "one optimizer over the parameters of two models", .act = [](Run& run) {
        const auto one = nested(run), other = one_unit(run);
        auto parameters = run.parameters(*one);
        for (const auto& parameter : run.parameters(*other)) parameters.push_back(parameter);
        const auto loss = [&](int step) { return loss_of(run, *one, step) + loss_of(run, *other, step + 3); };
        run.train(*one, loss, run.adamw(parameters));
        run.record_parameters(*other);
       }},
      {.what = "an optimizer over the head alone, the trunk staying as it is", .act = [](Run& run) {
        const auto model = one_unit(run);
        train_around(run, *model, run.adamw(*model->second), {});
       }},
      {.what = "layers that are sharded in a model that is not, `fully_shard(model)` being forgotten", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        run.shard(model->first);
        const auto optimizer = run.adamw(model->parameters());
        for (int step = 0; step < 4; step++) {
          run.backward(loss_of(run, *model, step));
          optimizer.step();
          optimizer.zero_grad();
        }
       }, .refused = "in no unit", .remark = "torch's optimizers are found out in the second backward pass"},
      {.what = "a loss with weights of its own in no unit", .act = [](Run& run) {
        train_with_loss_of_its_own(run, [](const Tensors&) {});
       }, .refused = "the ranks train tensors in no unit to different values"},
      {.what = "the same, with `average_gradients` of these weights", .act = [](Run& run) {
        train_with_loss_of_its_own(run, [&](const Tensors& weights) { average_gradients(weights, run.world()); });
       }},
      {.what = "the same, with a mean by `world.all_reduce`", .act = [](Run& run) {
        train_with_loss_of_its_own(run, [&](const Tensors& weights) {
          for (const auto& weight : weights) run.world().all_reduce(weight.grad(), {.op = Reduce::Mean}).wait();
        });
       }},
      {.what = "inputs of each rank that are moved by their own gradients, out of place", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        auto x = run.batch({4, 6}).requires_grad_();
        for (int step = 0; step < 4; step++) {
          run.backward(model->forward(x).pow(2).mean());
          x = (x.detach() + 0.1 * x.grad()).requires_grad_();
          optimizer.step();
          optimizer.zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "inputs of each rank that are moved in place, by `torch::autograd::grad`", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        const auto x = run.batch({4, 6}).requires_grad_();
        for (int step = 0; step < 4; step++) {
          const auto uphill = torch::autograd::grad({model->forward(x).pow(2).mean()}, {x})[0];
          {
            const torch::NoGradGuard no_grad;
            x.add_(uphill, 0.1);
          }
          run.backward(model->forward(x.detach()).pow(2).mean());
          optimizer.step();
          optimizer.zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "`step()` of an optimizer of Tessera without a backward pass", .act = [](Run& run) {
        const auto model = nested(run);
        optim::SGD optimizer(run.parameters(*model), {.lr = 0.1});
        optimizer.step();
       }, .refused = "a step without gradients", .remark = "`torch::optim` changes nothing then"},
      {.what = "`zero_grad()` between backward and `step()`", .act = [](Run& run) {
        const auto model = one_unit(run);
        optim::AdamW optimizer(run.parameters(*model), {});
        run.backward(loss_of(run, *model, 0));
        optimizer.zero_grad();
        optimizer.step();
       }, .refused = "zero_grad() after it"},
      {.what = "a step of frozen parameters alone", .act = [](Run& run) {
        const auto model = nested(run);
        const auto head = run.adamw(*model->second), trunk = run.adamw(*model->first);
        for (const auto& parameter : run.parameters(*model->first)) parameter.requires_grad_(false);
        for (int step = 0; step < 3; step++) {
          run.backward(loss_of(run, *model, step));
          trunk.step();
          head.step();
          model->zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "another learning rate in every step, also 0", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        const auto loss = [&](int step) {
          set_lr(optimizer, std::vector<double>{0.1, 0.05, 0, 0.02}[static_cast<size_t>(step)]);
          return loss_of(run, *model, step);
        };
        run.train(*model, loss, optimizer);
       }},
      {.what = "`torch::optim::StepLR` over an optimizer of torch", .act = [](Run& run) {
        const auto model = nested(run);
        const Steps optimizer(std::make_unique<torch::optim::SGD>(run.parameters(*model), torch::optim::SGDOptions(0.2)));
        torch::optim::StepLR schedule(*optimizer.theirs(), 2, 0.1);
        const auto loss = [&](int step) {
          if (step > 0) schedule.step();
          return loss_of(run, *model, step);
        };
        run.train(*model, loss, optimizer, 5);
       }},
      {.what = "an optimizer of torch made before sharding and moved by `tessera::rebind`", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        const auto options = torch::optim::AdamWOptions(0.05);
        const Steps optimizer(std::make_unique<torch::optim::AdamW>(model->parameters(), options));
        run.shard_nested(model);
        if (run.sharded()) rebind(*optimizer.theirs(), *model);
        train(run, *model, optimizer);
       }},
      {.what = "an optimizer made before sharding", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        const auto optimizer = run.sgd(model->parameters());
        run.shard_nested(model);
        run.backward(loss_of(run, *model, 0));
        optimizer.step();
       }, .refused = "Make optimizers after fully_shard"},
      {.what = "`add_param_group` of torch: the head joins later", .act = [](Run& run) {
        const auto model = nested(run);
        const Steps optimizer(std::make_unique<torch::optim::AdamW>(run.parameters(*model->first), torch::optim::AdamWOptions(0.05)));
        train(run, *model, optimizer);
        model->zero_grad();
        optimizer.theirs()->add_param_group(torch::optim::OptimizerParamGroup(run.parameters(*model->second)));
        train(run, *model, optimizer);
       }},
      {.what = "a step by a closure that computes the loss", .act = [](Run& run) {
        const auto model = nested(run);
        torch::optim::SGD optimizer(run.parameters(*model), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; step++) {
          run.record(optimizer.step([&] {
            optimizer.zero_grad();
            const auto loss = loss_of(run, *model, step);
            run.backward(loss);
            return loss;
          }));
        }
        run.record_parameters(*model);
       }},
      {.what = "`torch::optim::LBFGS`", .act = [](Run& run) {
        const auto model = nested(run);
        torch::optim::LBFGS optimizer(run.parameters(*model));
        optimizer.step([&] {
          optimizer.zero_grad();
          const auto loss = loss_of(run, *model, 0);
          run.backward(loss);
          return loss;
        });
       }, .refused = "would be the result of this rank alone"},
      {.what = "clipping by `tessera::clip_grad_norm`", .act = [](Run& run) {
        const auto model = nested(run);
        train_around(run, *model, run.sgd(*model), [&] { run.record(clip_grad_norm(run.parameters(*model), 0.05)); });
       }, .within = 1e-5, .because = kNormRounds},
      {.what = "clipping by `torch::nn::utils::clip_grad_value_`", .act = [](Run& run) {
        const auto model = nested(run);
        train_around(run, *model, run.adamw(*model), [&] { nn::utils::clip_grad_value_(run.parameters(*model), 0.02); });
       }},
      {.what = "weights clamped after each step", .act = [](Run& run) {
        const auto model = one_unit(run);
        train_around(run, *model, run.sgd(*model), {}, [&] {
          for (const auto& parameter : run.parameters(*model)) parameter.clamp_(-0.3, 0.3);
        });
       }},
      {.what = "gradient descent written by hand", .act = [](Run& run) {
        const auto model = nested(run);
        train_by_hand(run, *model, [](auto& parameter, auto& gradient, size_t) { parameter.sub_(gradient * 0.1); });
       }},
      {.what = "momentum and weight decay written by hand, through `.data()`", .act = [](Run& run) {
        const auto model = one_unit(run);
        Tensors velocity(4);
        train_by_hand(run, *model, [&](auto& parameter, auto& gradient, size_t i) {
          if (!velocity[i].defined()) velocity[i] = torch::zeros_like(gradient);
          velocity[i].mul_(0.9).add_(gradient);
          parameter.data().mul_(0.99).sub_(velocity[i] * 0.1);
        });
       }},
      {.what = "steps of the sign of the gradient, and none where it is small, by `where`", .act = [](Run& run) {
        const auto model = nested(run);
        train_by_hand(run, *model, [](auto& parameter, auto& gradient, size_t) {
          parameter.copy_(torch::where(gradient.abs() > 1e-3, parameter - 0.01 * gradient.sign(), parameter));
        });
       }},
      {.what = "`at::_foreach_add_` over all parameters and gradients", .act = [](Run& run) {
        const auto model = one_unit(run);
        for (int step = 0; step < 4; step++) {
          run.backward(loss_of(run, *model, step));
          const torch::NoGradGuard no_grad;
          Tensors gradients;
          for (const auto& parameter : run.parameters(*model)) gradients.push_back(parameter.grad());
          at::_foreach_add_(run.parameters(*model), gradients, -0.1);
          model->zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "an exponential mean of the weights, put in place for an evaluation", .act = [](Run& run) {
        const auto model = nested(run);
        const auto parameters = run.parameters(*model);
        const auto mean = copies(parameters);
        train_around(run, *model, run.adamw(*model), {}, [&] {
          const auto own = copies(parameters);
          for (size_t i = 0; i < parameters.size(); i++) {
            mean[i].mul_(0.75).add_(parameters[i].detach() * 0.25);
            parameters[i].copy_(mean[i]);
          }
          run.record(model->forward(run.batch({4, 6}, 9)));
          for (size_t i = 0; i < parameters.size(); i++) parameters[i].copy_(own[i]);
        });
       }},
      {.what = "Lookahead: slow weights that follow every second step", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto parameters = run.parameters(*model);
        const auto slow = copies(parameters);
        int steps = 0;
        train_around(run, *model, run.sgd(*model), {}, [&] {
          if (++steps % 2 == 1) return;
          for (size_t i = 0; i < parameters.size(); i++) {
            slow[i].add_((parameters[i] - slow[i]) * 0.5);
            parameters[i].copy_(slow[i]);
          }
        });
       }},
      {.what = "an optimizer derived from `optim::Optimizer`, made of operators, with clipping", .act = [](Run& run) {
        struct Rule final : optim::Optimizer {
          explicit Rule(const Tensors& parameters)
              : Optimizer({{.parameters = parameters}}, {.lr = 0.2, .weight_decay = 0.1}, {}, "a rule of one's own") {}
          void apply(const Settings& settings, int64_t, const Item& item) override {
            auto parameter = item.parameter;
            const auto gradient = item.factor.defined() ? item.gradient * item.factor : item.gradient;
            parameter.mul_(1 - settings.lr * settings.weight_decay).sub_(gradient.sign() + gradient, settings.lr);
          }
        };
        const auto model = nested(run);
        auto rule = std::make_unique<Rule>(run.parameters(*model));
        auto& own = *rule;
        train_around(run, *model, Steps(std::move(rule)), [&] { run.record(own.clip_grad_norm(0.05)); });
       }, .within = 1e-5, .because = kNormRounds},
      {.what = "sharpness-aware steps: uphill, backward again, back, and down", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 3; step++) {
          run.backward(loss_of(run, *model, step));
          const auto parameters = run.parameters(*model);
          Tensors uphill;
          {
            const torch::NoGradGuard no_grad;
            const auto norm = grad_norm(parameters).item<double>();
            for (const auto& parameter : parameters) uphill.push_back(parameter.grad() * (0.05 / norm));
            for (size_t i = 0; i < parameters.size(); i++) parameters[i].add_(uphill[i]);
          }
          optimizer.zero_grad();
          run.backward(loss_of(run, *model, step));
          const torch::NoGradGuard no_grad;
          for (size_t i = 0; i < parameters.size(); i++) parameters[i].sub_(uphill[i]);
          optimizer.step();
          optimizer.zero_grad();
          run.record_parameters(*model);
        }
       }, .within = 1e-5, .because = kNormRounds},
      }};
}

}  // namespace tessera::idioms::optimizers
