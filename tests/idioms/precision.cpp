// Dtypes: models that are not float32, parameters that are narrower while they are whole, autocast, integers, statistics.

#include "idiom.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/call.h"
#include "tessera/shard/full_params.h"

namespace tessera::idioms::precision {
namespace {

namespace nn = torch::nn;

ShardOptions narrow(const Run& run) {
  return {.mesh = run.world(), .mixed_precision = {.param_dtype = at::kBFloat16}};
}

/// What param_dtype does, written out for the plain run.
at::Tensor used(const Run& run, const at::Tensor& tensor) {
  return run.sharded() ? tensor : tensor.to(at::kBFloat16);
}
at::Tensor linear(const Run& run, const nn::Linear& layer, const at::Tensor& x) {
  return torch::linear(used(run, x), used(run, layer->weight), used(run, layer->bias));
}

void train_in(Run& run, at::ScalarType dtype) {
  const auto model = std::make_shared<Mlp>();
  model->to(dtype);
  run.shard_nested(model);
  run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step).to(dtype)).pow(2).mean(); }, run.sgd(*model));
}

/// An optimizer of one's own, made of operators.
class Rule : public optim::Optimizer {
 public:
  explicit Rule(const std::vector<at::Tensor>& parameters)
      : Optimizer({{.parameters = parameters}}, {.lr = 0.5, .weight_decay = 0}, {{.name = "mean"}}, "a rule of one's own") {}

 protected:
  void apply(const Settings& settings, int64_t /*step*/, const Item& item) override {
    auto mean = item.state[0];
    mean.mul_(0.5).add_(item.gradient);
    at::Tensor(item.parameter).sub_(mean, settings.lr);
  }
};

/// A Rule that changes its parameters when it has seen all gradients.
class LateRule final : public Rule {
 public:
  using Rule::Rule;

 private:
  void apply(const Settings& /*settings*/, int64_t /*step*/, const Item& item) override { seen_.push_back({item.parameter, item.gradient}); }
  void end_step() override {
    for (const auto& [parameter, gradient] : seen_) at::Tensor(parameter).sub_(gradient, 0.5);
    seen_.clear();
  }
  bool can_step_in_backward() const override { return false; }
  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;
};

/// A model that computes in bfloat16, with an optimizer of one's own.
template <class Made>
void train_narrow(Run& run, const Made& made) {
  const auto model = nested(run, narrow(run));
  const auto loss = [&](int step) {
    const auto h = torch::tanh(linear(run, model->first, run.batch({4, 6}, step)));
    return linear(run, model->second, h).to(at::kFloat).pow(2).mean();
  };
  made(*model, loss);
}

/// Evaluations of such a model, before each of which something is done with whole parameters, as it is done with plain ones.
void change_narrow(Run& run, const std::function<void(Mlp& model, int step)>& change, Access access = Access::Write) {
  const auto model = nested(run, narrow(run));
  const torch::NoGradGuard no_grad;
  for (int step = 0; step < 3; step++) {
    {
      std::optional<FullParams> guard;
      if (run.sharded()) guard.emplace(full_params(*model, access));
      change(*model, step);
    }
    run.record(linear(run, model->second, torch::tanh(linear(run, model->first, run.batch({4, 6}, step)))));
  }
  run.record_parameters(*model);
}

at::Tensor words(const Run& run, int step) {
  const std::vector<int64_t> all = {1, 4, 6, 0, 3, 5, 2};  // each once: sums of rows have an order otherwise
  const auto first = static_cast<size_t>((run.rank() + step) % 4);
  return torch::tensor(std::vector<int64_t>(all.begin() + static_cast<int64_t>(first), all.begin() + static_cast<int64_t>(first) + 3));
}

}  // namespace

Chapter chapter() {
  return {
      .title = "Precision",
      .idioms = {
      {.what = "a model in double", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        model->to(at::kDouble);
        run.shard_nested(model);
        const auto loss = [&](int step) { return model->forward(run.batch({4, 6}, step).to(at::kDouble)).pow(2).mean(); };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "a model in bfloat16", .act = [](Run& run) { train_in(run, at::kBFloat16); },
       .within = 2e-2, .because = "gradients are averaged in bfloat16 there, in float32 here"},
      {.what = "a model in half", .act = [](Run& run) { train_in(run, at::kHalf); },
       .within = 5e-3, .because = "gradients are averaged in half there, in float32 here"},
      {.what = "complex parameters, with an optimizer of torch", .act = [](Run& run) {
        struct Model : nn::Module {
          at::Tensor w = register_parameter("w", torch::complex(values({5, 3}), values({5, 3}, 1)));
          at::Tensor forward(const at::Tensor& x) { return torch::complex(x, 0.5 * x).mm(w).abs(); }
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.5);
        const Steps optimizer(std::make_unique<torch::optim::SGD>(run.parameters(*model), sgd));
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).mean(); }, optimizer);
       }, .within = 1e-5, .because = "complex sums may be added in another order"},
      {.what = "complex parameters, with an optimizer of Tessera", .act = [](Run& run) {
        const auto model = std::make_shared<nn::Module>();
        model->register_parameter("w", torch::complex(values({5, 3}), values({5, 3}, 1)));
        run.shard(model);
        optim::AdamW optimizer(run.parameters(*model), optim::AdamWOptions{.lr = 0.1});
        for (const auto& parameter : run.parameters(*model)) parameter.mutable_grad() = torch::ones_like(parameter);
        optimizer.step();
       }, .refused = "complex", .remark = "`torch::optim` takes them"},
      {.what = "real parameters viewed as complex numbers in forward", .act = [](Run& run) {
        struct Model : nn::Module {
          at::Tensor w = register_parameter("w", values({5, 3, 2}));
          at::Tensor forward(const at::Tensor& x) { return torch::view_as_real(torch::complex(x, x).mm(torch::view_as_complex(w))); }
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 5}, step)).pow(2).mean(); }, run.adamw(*model));
       }},
      {.what = "parameters of two dtypes in one unit", .act = [](Run& run) {
        struct Model : Mlp {
          at::Tensor scale = register_parameter("scale", values({3}, 2).to(at::kDouble));
          at::Tensor forward(const at::Tensor& x) { return Mlp::forward(x).to(at::kDouble) * scale; }
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "a frozen parameter of integers that indexes another one", .act = [](Run& run) {
        struct Model : nn::Module {
          at::Tensor table = register_parameter("table", values({7, 3}));
          at::Tensor order = register_parameter("order", torch::tensor({3, 1, 6, 0}, at::kLong), /*requires_grad=*/false);
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        std::vector<at::Tensor> trained;
        for (const auto& parameter : run.parameters(*model)) {
          if (parameter.is_floating_point()) trained.push_back(parameter);
        }
        const auto loss = [&](int step) { return (model->table.index_select(0, model->order) * run.batch({4, 3}, step)).pow(2).mean(); };
        run.train(*model, loss, run.adamw(trained));
       }},
      {.what = "buffers of integers and of booleans: a counter and a mask", .act = [](Run& run) {
        struct Model : Mlp {
          at::Tensor calls = register_buffer("calls", torch::zeros({1}, at::kLong));
          at::Tensor mask = register_buffer("mask", values({5, 6}).gt(-0.5));
          at::Tensor forward(const at::Tensor& x) {
            calls.add_(1);
            return second(torch::tanh(torch::linear(x, first->weight * mask, first->bias))) * calls.to(at::kFloat);
          }
        };
        const auto model = std::make_shared<Model>();
        run.shard(model);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.adamw(*model));
        run.record(model->calls);
       }},
      {.what = "a float32 weight cast by hand in forward", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          const auto h = torch::tanh(torch::mm(run.batch({4, 6}, step).to(at::kBFloat16), model->first->weight.to(at::kBFloat16).t()));
          return torch::linear(h.to(at::kDouble), model->second->weight.to(at::kDouble)).pow(2).mean();
        };
        run.train(*model, loss, run.sgd(*model));
       }},
      {.what = "`param_dtype` of bfloat16 beside a model that casts its weights itself", .act = [](Run& run) {
        const auto model = nested(run, narrow(run));
        const auto loss = [&](int step) {
          const auto h = torch::tanh(linear(run, model->first, run.batch({4, 6}, step)));
          return linear(run, model->second, h).to(at::kFloat).pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "an optimizer of one's own, made of operators, with `param_dtype`", .act = [](Run& run) {
        train_narrow(run, [&](Mlp& model, const auto& loss) {
          run.train(model, loss, Steps(std::make_unique<Rule>(run.parameters(model))));
        });
       }},
      {.what = "an optimizer of one's own that changes parameters at the end of a step, with `param_dtype`", .act = [](Run& run) {
        train_narrow(run, [&](Mlp& model, const auto& loss) {
          run.train(model, loss, Steps(std::make_unique<LateRule>(run.parameters(model))));
        });
       }},
      {.what = "an optimizer of one's own that steps in backward, with `param_dtype`", .act = [](Run& run) {
        train_narrow(run, [&](Mlp& model, const auto& loss) {
          auto rule = std::make_unique<Rule>(run.parameters(model));
          if (run.sharded()) rule->step_in_backward();
          run.train(model, loss, Steps(std::move(rule)));
        });
       }},
      {.what = "an optimizer of one's own for one layer, and `AdamW` for the other, with `param_dtype`", .act = [](Run& run) {
        train_narrow(run, [&](Mlp& model, const auto& loss) {
          Rule rule(run.parameters(*model.first));
          run.train(model, [&](int step) {
            if (step > 0) rule.step();
            rule.zero_grad();
            return loss(step);
          }, run.adamw(*model.second));
        });
       }},
      {.what = "an optimizer of one's own and `AdamW` for one unit in turn, with `param_dtype`", .act = [](Run& run) {
        train_narrow(run, [&](Mlp& model, const auto& loss) {
          Rule rule(run.parameters(*model.first));
          const auto other = run.adamw(*model.first);
          for (int step = 0; step < 4; step++) {
            run.backward(loss(step));
            if (step % 2 == 0) rule.step();
            other.step();
            if (step % 2 == 1) rule.step();
            model.zero_grad();
          }
          run.record_parameters(model);
        });
       }},
      {.what = "a mean over 200 steps kept in the weights by hand, in `full_params` for writing, with `param_dtype`", .act = [](Run& run) {
        change_narrow(run, [](Mlp& model, int step) {
          for (int i = 0; i < 200; i++) {
            auto weight = model.first->weight;
            weight.copy_(0.999 * weight + 0.001 * values(weight.sizes(), step));
          }
        });
       }},
      {.what = "the same by operators in place, and one guard for each step", .act = [](Run& run) {
        const auto model = nested(run, narrow(run));
        const torch::NoGradGuard no_grad;
        for (int i = 0; i < 40; i++) {
          std::optional<FullParams> guard;
          if (run.sharded()) guard.emplace(full_params(*model, Access::Write));
          for (auto* tensor : {&model->first->weight, &model->second->bias}) tensor->mul_(0.999).add_(values(tensor->sizes(), 3), 0.001);
        }
        run.record_parameters(*model);
       }},
      {.what = "copies of whole weights made in `full_params` for writing, with `param_dtype`", .act = [](Run& run) {
        change_narrow(run, [&](Mlp& model, int) {
          run.record(model.first->weight);
          run.record(model.second->weight.data());
          run.record(torch::tensor(model.second->bias.accessor<float, 1>()[1]));
        });
       }, .remark = "they have the dtype and the values of the shards; for reading, those that operators compute with"},
      {.what = "weights written by pointer in `full_params` for writing, with `param_dtype`", .act = [](Run& run) {
        change_narrow(run, [](Mlp& model, int) { model.first->weight.data_ptr<float>()[7] *= 1.0001F; });
       }},
      {.what = "a forward pass in `full_params` for writing, with `param_dtype`", .act = [](Run& run) {
        change_narrow(run, [&](Mlp& model, int step) { run.record(model.forward(run.batch({4, 6}, step))); });
       }, .remark = "it computes with what the shards hold"},
      {.what = "writing in `full_params`, inside of another that reads, with `param_dtype`", .act = [](Run& run) {
        change_narrow(run, [&](Mlp& model, int) {
          std::optional<FullParams> guard;
          if (run.sharded()) guard.emplace(full_params(model, Access::Write));
          model.second->weight.mul_(1.001);
        }, Access::Read);
       }},
      {.what = "a view from before `full_params` for writing, used inside, with `param_dtype`", .act = [](Run& run) {
        const auto model = one_unit(run, narrow(run));
        const auto view = model->first->weight.t();
        const auto guard = full_params(*model, Access::Write);
        run.record(view * 2);
       }, .refused = "uses a view of"},
      {.what = "a view from inside of `full_params` for writing, used afterwards, with `param_dtype`", .act = [](Run& run) {
        const auto model = one_unit(run, narrow(run));
        at::Tensor view;
        {
          const auto guard = full_params(*model, Access::Write);
          view = model->first->weight.t();
        }
        run.record(view * 2);
       }, .refused = "from inside tessera::full_params(module, Access::Write)"},
      {.what = "backward in `full_params` for writing, through a graph from before, with `param_dtype`", .act = [](Run& run) {
        const auto model = one_unit(run, narrow(run));
        const auto loss = model->forward(run.batch({4, 6}, 0)).pow(2).mean();
        const auto guard = full_params(*model, Access::Write);
        run.backward(loss);
       }, .refused = "from before tessera::full_params(module, Access::Write)"},
      {.what = "`alias = weight.data()` that is kept over steps, with `param_dtype`", .act = [](Run& run) {
        const auto model = nested(run, narrow(run));
        const auto alias = model->first->weight.data();
        const torch::NoGradGuard no_grad;
        for (int step = 0; step < 3; step++) {
          for (auto& parameter : run.parameters(*model)) parameter.mul_(0.7);
          run.record(used(run, alias));
        }
       }},
      {.what = "`param_dtype` of bfloat16, and an input that is refilled through its pointer between two uses", .act = [](Run& run) {
        const auto model = one_unit(run, narrow(run));
        const auto x = torch::zeros({4, 6});
        const auto refill = [&](int number) {
          const auto source = run.batch({4, 6}, number);
          std::copy_n(source.data_ptr<float>(), source.numel(), x.data_ptr<float>());
        };
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 3; step++) {
          refill(step);
          {
            const torch::NoGradGuard no_grad;
            run.record(linear(run, model->first, x));
            refill(step + 5);
            run.record(linear(run, model->first, x));
          }
          const auto loss = linear(run, model->second, torch::tanh(linear(run, model->first, x.clone()))).to(at::kFloat).pow(2).mean();
          run.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
          run.record(loss);
        }
       }},
      {.what = "gradients that travel in bfloat16 by `reduce_dtype`", .act = [](Run& run) {
        const auto model = nested(run, {.mesh = run.world(), .mixed_precision = {.reduce_dtype = at::kBFloat16}});
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.sgd(*model));
       }, .within = 2e-2, .because = "bfloat16 has 8 bits"},
      {.what = "autocast around forward", .act = [](Run& run) {
        const auto model = nested(run);
        const auto loss = [&](int step) {
          const Autocast autocast;
          return model->forward(run.batch({4, 6}, step)).to(at::kFloat).pow(2).mean();
        };
        run.train(*model, loss, run.adamw(*model));
       }},
      {.what = "autocast around forward and backward, with a part in which it is off", .act = [](Run& run) {
        const auto model = one_unit(run);
        const auto optimizer = run.sgd(*model);
        for (int step = 0; step < 3; step++) {
          const Autocast autocast;
          auto h = torch::tanh(model->first(run.batch({4, 6}, step)));
          {
            const Autocast off(false);
            h = model->second(h.to(at::kFloat));
          }
          const auto loss = h.pow(2).mean();
          run.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "loss scaling: a loss times 1024, gradients divided by it", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        for (int step = 0; step < 3; step++) {
          const auto loss = model->forward(run.batch({4, 6}, step)).pow(2).mean();
          run.backward(loss * 1024);
          for (const auto& parameter : run.parameters(*model)) parameter.grad().div_(1024);
          run.record_gradients(run.parameters(*model));
          optimizer.step();
          optimizer.zero_grad();
        }
        run.record_parameters(*model);
       }},
      {.what = "`tessera::optim::GradScaler`, which scales the loss and divides the gradients", .act = [](Run& run) {
        const auto model = nested(run);
        const auto optimizer = run.adamw(*model);
        optim::GradScaler scaler;
        for (int step = 0; step < 3; step++) {
          const auto loss = loss_of(run, *model, step);
          run.backward(run.sharded() ? scaler.scale(loss) : loss);
          if (!run.sharded()) {
            optimizer.step();
          } else {
            run.setting().optimizer == By::Tessera ? scaler.step(*optimizer.ours()) : scaler.step(*optimizer.theirs());
            scaler.update();
          }
          optimizer.zero_grad();
          run.record(loss);
        }
        run.record_parameters(*model);
       }},
      {.what = "`tessera::call(model, x)` of a model with `output_dtype`", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        auto options = narrow(run);
        options.mixed_precision.output_dtype = at::kFloat;
        run.shard(*model, options);
        const auto forward = [&](const at::Tensor& x) {
          if (run.sharded()) return call(model, x);
          return linear(run, model->second, torch::tanh(linear(run, model->first, x))).to(at::kFloat);
        };
        run.train(*model, [&](int step) { return forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "a plain call of a model with `output_dtype`", .act = [](Run& run) {
        const auto model = std::make_shared<Mlp>();
        auto options = narrow(run);
        options.mixed_precision.output_dtype = at::kFloat;
        run.shard(*model, options);
        (void)model->forward(run.batch({4, 6}, 0));
       }, .refused = "tessera::call"},
      {.what = "an embedding with a padding index", .act = [](Run& run) {
        nn::Embedding table(nn::EmbeddingOptions(7, 3).padding_idx(3));
        fill(*table);
        run.shard(table);
        const auto loss = [&](int step) { return (table(words(run, step)) + run.batch({3, 3}, step)).pow(2).mean(); };
        run.train(*table, loss, run.sgd(*table));
       }},
      {.what = "an embedding whose gradients are sparse", .act = [](Run& run) {
        nn::Embedding table(nn::EmbeddingOptions(7, 3).sparse(true));
        fill(*table);
        run.shard(table);
        const auto loss = [&](int step) { return (table(words(run, step)) + run.batch({3, 3}, step)).pow(2).mean(); };
        run.train(*table, loss, run.sgd(*table));
       }, .remark = "they are made dense before they are averaged"},
      {.what = "an `EmbeddingBag` of means, under a linear layer", .act = [](Run& run) {
        nn::EmbeddingBag bag(nn::EmbeddingBagOptions(7, 3).mode(torch::kMean));
        nn::Linear head(3, 2);
        fill(*bag);
        fill(*head);
        run.shard(bag);
        run.shard(head);
        const auto one = run.adamw(*bag), other = run.sgd(*head);
        for (int step = 0; step < 3; step++) {
          const auto loss = head(bag(words(run, step), torch::tensor({0, 2}))).pow(2).mean();
          run.backward(loss);
          one.step();
          other.step();
          one.zero_grad();
          other.zero_grad();
          run.record(loss);
        }
        run.record_parameters(*bag);
        run.record_parameters(*head);
       }},
      {.what = "batch norm: the running statistics of each rank's batches, and an evaluation with them", .act = [](Run& run) {
        nn::Sequential model(nn::Linear(6, 5), nn::BatchNorm1d(5), nn::Linear(5, 2));
        fill(*model);
        run.shard_nested(model);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).mean(); }, run.adamw(*model));
        for (const auto& buffer : model->buffers()) run.record(buffer);
        model->eval();
        run.record(model->forward(run.batch({4, 6}, 9)));
       }},
      {.what = "batch norm with a cumulative mean, whose statistics are averaged by `tessera::sync_buffers`", .act = [](Run& run) {
        nn::BatchNorm1d norm(nn::BatchNormOptions(6).momentum(std::nullopt));
        fill(*norm);
        run.shard(norm);
        run.train(*norm, [&](int step) { return norm(run.batch({4, 6}, step)).sub(1).pow(2).mean(); }, run.sgd(*norm));
        sync_buffers(*norm, run.world(), BufferSync::Mean);
        for (const auto& buffer : norm->buffers()) run.record(buffer);
        norm->eval();
        run.record(norm(run.batch({4, 6}, 9)));
       }},
      {.what = "evaluation in float32 of a model with a `param_dtype` of bfloat16, inside `full_params(model, Access::ReadStored)`",
       .act = [](Run& run) {
         Mlp net;
         run.shard_nested(net, narrow(run));
         const torch::NoGradGuard no_grad;
         std::optional<FullParams> exact;
         if (run.sharded()) exact.emplace(full_params(net, Access::ReadStored));
         for (int step = 0; step < 3; step++) run.record(loss_of(run, net, step));
       }},
      {.what = "the same after training, beside a plain model with the same values", .act = [](Run& run) {
         Mlp net, plain;
         run.shard_nested(net, narrow(run));
         const auto optimizer = run.adamw(net);
         for (int step = 0; step < 3; step++) {
           run.backward(loss_of(run, net, step));
           optimizer.step();
           optimizer.zero_grad();
         }
         const torch::NoGradGuard no_grad;
         const auto state = full_state(net);
         for (auto& item : plain.named_parameters()) item.value().copy_(state.at(item.key()));
         std::optional<FullParams> exact;
         if (run.sharded()) exact.emplace(full_params(net, Access::ReadStored));
         run.record(loss_of(run, net, 9) - loss_of(run, plain, 9));
       }},
      {.what = "`buffer_dtype` of bfloat16, and a buffer in `ignored` that keeps its dtype", .act = [](Run& run) {
        struct Model : nn::Module {
          nn::Linear layer = register_module("layer", nn::Linear(6, 3));
          at::Tensor table = register_buffer("table", values({3}, 0.4));
          Model() { fill(*this); }
          at::Tensor forward(const at::Tensor& x) { return layer(x) * table; }
        };
        const auto model = std::make_shared<Model>();
        run.shard(model, {.mesh = run.world(), .mixed_precision = {.buffer_dtype = at::kBFloat16}, .ignored = {model->table}});
        run.record(model->table);
        run.train(*model, [&](int step) { return loss_of(run, *model, step); }, run.adamw(*model));
       }},
      {.what = "statistics of a batch norm that is used in bfloat16 by `param_dtype`", .act = [](Run& run) {
        nn::BatchNorm1d norm(6);
        run.shard(norm, narrow(run));
        for (int step = 0; step < 3; step++) (void)norm(run.batch({4, 6}, step));
        for (const auto& buffer : norm->buffers()) run.record(buffer);
       }, .remark = "they are those of the float32 input"},
      {.what = "`to(dtype)` after sharding", .act = [](Run& run) {
        const auto model = one_unit(run);
        model->to(at::kBFloat16);
       }, .refused = "before fully_shard"},
      }};
}

}  // namespace tessera::idioms::precision
