// Adapters of low rank, which lora::apply gives to models whose code knows nothing of them.
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <sstream>

#include "idiom.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/nn/lora.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/average.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"

namespace tessera::idioms::adapters {
namespace {

namespace nn = torch::nn;
using lora::Options;
using Tensors = std::vector<at::Tensor>;

const Options kSmall{.r = 2, .lora_alpha = 3};
constexpr auto kOrder = "written out, sums have another order";
constexpr auto kNormRounds = "a norm over shards is added in another order";
constexpr auto kVectors = "shards end where vector instructions do not";

/// 6 -> 5 -> 5 -> 3. Its head gets no adapter unless it is named.
struct Net : nn::Module {
  nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  Net() {
    first = register_module("first", nn::Linear(6, 5));
    second = register_module("second", nn::Linear(5, 5));
    head = register_module("head", nn::Linear(5, 3));
    fill(*this);
  }
  at::Tensor hidden(const at::Tensor& x) { return torch::tanh(second(torch::tanh(first(x)))); }
  at::Tensor forward(const at::Tensor& x) { return head(hidden(x)); }
};

/// Adapters whose B is not 0, as if they had been trained.
void adapt(nn::Module& module, const Options& options = kSmall, const std::string& name = "default") {
  lora::apply(module, options, name);
  fill(module);
}

std::shared_ptr<Net> adapted(Run& run, const Options& options = kSmall) {
  const auto net = std::make_shared<Net>();
  adapt(*net, options);
  run.shard_nested(net);
  return net;
}

/// A Net with the adapters "default" and "other".
std::shared_ptr<Net> twice_adapted(Run& run) {
  const auto net = std::make_shared<Net>();
  adapt(*net);
  adapt(*net, {.r = 3}, "other");
  run.shard_nested(net);
  return net;
}

template <class Model>
void train(Run& run, Model& model, const Steps& optimizer) {
  run.train(model, [&](int step) { return loss_of(run, model, step); }, optimizer, 3);
}
template <class Model>
void train(Run& run, Model& model) {
  train(run, model, run.adamw(model));
}

/// Three steps with something before and after each. Records all gradients, also missing ones.
using Act = std::function<void(int step)>;
void train_around(Run& run, Net& net, const Steps& optimizer, const Act& before, const Act& after = {}) {
  for (int step = 0; step < 3; step++) {
    if (before) before(step);
    const auto loss = loss_of(run, net, step);
    run.backward(loss);
    run.record_gradients(run.parameters(net));
    if (after) after(step);
    optimizer.step();
    optimizer.zero_grad();
    run.record(loss);
  }
  run.record_parameters(net);
}

void evaluate(Run& run, Net& net) {
  const torch::NoGradGuard no_grad;
  run.record(net.forward(run.batch({4, 6}, 20)));
}

bool is_of(const std::string& name, const std::string& part) {
  return name.find("." + part + ".") != std::string::npos;
}

/// The parameters whose names have this part, such as "lora_A", as an optimizer takes them.
Tensors parameters_of(const Run& run, const nn::Module& model, const std::string& part) {
  Tensors result;
  if (run.sharded()) {
    for (const auto& [name, tensor] : named_parameters(model)) {
      if (is_of(name, part)) result.push_back(tensor);
    }
    return result;
  }
  for (const auto& item : model.named_parameters()) {
    if (is_of(item.key(), part)) result.push_back(item.value());
  }
  return result;
}

Tensors that_train(const Tensors& parameters) {
  Tensors result;
  std::ranges::copy_if(parameters, std::back_inserter(result), [](const at::Tensor& p) { return p.requires_grad(); });
  return result;
}

/// AdamW with settings of its own for A and for B.
Steps of_a_and_b(const Run& run, const nn::Module& model, double lr_of_b, double decay_of_a) {
  const auto a = parameters_of(run, model, "lora_A"), b = parameters_of(run, model, "lora_B");
  if (run.setting().optimizer == By::Tessera) {
    const std::vector<optim::ParameterGroup> groups = {{.parameters = a, .lr = 0.01, .weight_decay = decay_of_a},
                                                       {.parameters = b, .lr = lr_of_b, .weight_decay = 0}};
    return Steps(std::make_unique<optim::AdamW>(groups, optim::AdamWOptions{.eps = run.setting().epsilon}));
  }
  const auto options = [&](double lr, double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(lr).weight_decay(decay).eps(run.setting().epsilon));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(a, options(0.01, decay_of_a));
  groups.emplace_back(b, options(lr_of_b, 0));
  return Steps(std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions()));
}

/// A layer with an adapter, in a sharded run, and what the adapter does written out in the plain one.
template <class Layer>
void written_out(Run& run, const Layer& layer, Options options, const std::function<at::Tensor(const at::Tensor& weight, int step)>& output) {
  nn::Sequential model(layer);
  options.layers.target_modules = {"0"};
  adapt(*model, options);
  run.shard(model);
  const double scaling = lora::scaling_of(options, "0");
  const auto weight = [&] {
    if (run.sharded()) return layer->weight;
    const bool is_embedding = layer->name().find("Embedding") != std::string::npos;
    const auto find = [&](const std::string& part) {
      const auto found = parameters_of(run, *model, part);
      return found.empty() ? at::Tensor() : found.front().flatten(1);
    };
    const auto product = is_embedding ? find("lora_embedding_B").mm(find("lora_embedding_A")).t() : find("lora_B").mm(find("lora_A"));
    const auto sum = layer->weight.detach() + scaling * product.reshape(layer->weight.sizes());
    if (!options.use_dora) return sum;
    const auto magnitude = parameters_of(run, *model, "lora_magnitude_vector").front();
    return sum * (magnitude / sum.detach().norm(2, 1)).unsqueeze(1);
  };
  run.train(*model, [&](int step) { return output(weight(), step).pow(2).mean(); }, run.sgd(*model));
}

/// A loss of one layer's weight, used in another way than by the layer's forward.
Idiom functional(const std::string& what, const std::function<at::Tensor(const at::Tensor& x, nn::Linear& layer)>& use,
                 const std::string& remark = {}) {
  return {.what = what,
          .act =
              [use](Run& run) {
                const auto net = adapted(run);
                const auto loss = [&](int step) {
                  const auto h = torch::tanh(use(run.batch({4, 6}, step), net->first));
                  return net->head(torch::tanh(net->second(h))).pow(2).mean();
                };
                run.train(*net, loss, run.adamw(*net));
              },
          .remark = remark};
}

Idiom options(const std::string& what, const Options& of, const std::string& remark = {}) {
  return {.what = what,
          .act =
              [of](Run& run) {
                const auto net = adapted(run, of);
                train_around(run, *net, run.adamw(*net), {});
              },
          .remark = remark};
}

struct Words : nn::Module {
  nn::Embedding words = register_module("words", nn::Embedding(7, 4));
  nn::Linear head = register_module("head", nn::Linear(nn::LinearOptions(4, 7).bias(false)));
  Words() { fill(*this); }
  at::Tensor forward(const at::Tensor& index) { return head(torch::tanh(words(index))); }
};

/// Distinct words, because the order of sums would matter for repeated ones.
at::Tensor some_words(const Run& run, int step) {
  return torch::tensor({1, 4, 6}).add(step + run.rank()).remainder(7);
}

void train_words(Run& run, Words& model, const Options& of) {
  adapt(model, of);
  run.shard(model);
  run.train(model, [&](int step) { return model.forward(some_words(run, step)).pow(2).mean(); }, run.sgd(model));
}

void train_conv(Run& run, const nn::Conv2dOptions& of_conv, const Options& of) {
  nn::Sequential model(nn::Conv2d(of_conv), nn::Flatten(), nn::Linear(nn::LinearOptions(of_conv.out_channels() * 36, 2)));
  fill(*model);
  adapt(*model, of);
  run.shard_nested(*model);
  run.train(*model, [&](int step) { return model->forward(run.batch({2, 4, 6, 6}, step)).pow(2).mean(); }, run.sgd(*model, 0.001));
}

/// The loss of DPO in small: what a model prefers, compared with what its base prefers.
at::Tensor preference(const at::Tensor& own, const at::Tensor& of_base) {
  const auto margin = [](const at::Tensor& scores) { return scores.log_softmax(1).select(1, 0) - scores.log_softmax(1).select(1, 1); };
  return -(0.5 * (margin(own) - margin(of_base))).sigmoid().log().mean();
}

const Options kWords{.r = 2, .layers = {.target_modules = {"words"}}};
const Options kConv{.r = 2, .lora_alpha = 1, .layers = {.target_modules = {"0"}}};

}  // namespace

Chapter chapter() {
  return {.title = "Adapters", .idioms = {
    // --- What the options of lora::apply do ---
    options("LoRA, all parameters given to the optimizer", kSmall),
    {.what = "LoRA, the model one unit", .act = [](Run& run) {
       Net net;
       adapt(net);
       run.shard(net);
       train(run, net);
     }},
    options("rsLoRA", {.r = 3, .lora_alpha = 2, .use_rslora = true}),
    options("DoRA", {.r = 2, .use_dora = true}),
    options("other ranks and factors for some layers, `rank_pattern` and `alpha_pattern`",
            {.r = 2, .rank_pattern = {{"first", 3}}, .alpha_pattern = {{"second", 5}}}),
    options("an adapter on one layer only, of rank 1", {.r = 1, .layers = {.target_modules = {"second"}}}),
    options("adapters on all layers, the head too", {.r = 2, .layers = {.target_pattern = ".*"}}),
    options("`modules_to_save`: the head trains as a whole", {.r = 2, .modules_to_save = {"head"}}),
    options("`Bias::All`", {.r = 2, .bias = lora::Bias::All}),
    options("`Bias::LoraOnly`", {.r = 2, .bias = lora::Bias::LoraOnly}),
    {.what = "a dropout in adapters, in evaluation", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .lora_dropout = 0.5});
       net->eval();
       train(run, *net);
     }},
    {.what = "a dropout in adapters that a model in evaluation gets", .act = [](Run& run) {
       Net net;
       net.eval();
       adapt(net, {.r = 2, .lora_dropout = 0.5});
       run.shard_nested(net);
       train(run, net);
     }},
    {.what = "PiSSA: adapters that are the principal part of the weights", .act = [](Run& run) {
       Net net;
       lora::apply(net, {.r = 2, .init_lora_weights = lora::Init::Pissa});
       run.shard_nested(net);
       train(run, net);
     }},
    {.what = "adapters as they are drawn: all ranks, and all runs, draw the same", .act = [](Run& run) {
       Net net;
       lora::apply(net, {.r = 2, .layers = {.target_modules = {"first"}}});
       lora::apply(net, {.r = 2, .layers = {.target_modules = {"second"}}, .init_lora_weights = lora::Init::Gaussian}, "other");
       run.shard(net);
       run.record_parameters(net);
     }},
    {.what = "only a part of the model gets adapters, `lora::apply(model.first)`; the rest trains as a whole", .act = [](Run& run) {
       struct Parts : nn::Module {
         std::shared_ptr<Net> trunk = register_module("trunk", std::make_shared<Net>());
         nn::Linear top = register_module("top", nn::Linear(3, 2));
         Parts() { fill(*this); }
         at::Tensor forward(const at::Tensor& x) { return top(torch::tanh(trunk->forward(x))); }
       } model;
       lora::apply(*model.trunk, kSmall);
       run.shard_nested(model);
       train(run, model);
     }},
    // --- The same, written out ---
    {.what = "LoRA, and the same written out: `x W' + s B A x`", .act = [](Run& run) {
       written_out(run, nn::Linear(6, 5), kSmall, [&](const auto& w, int step) { return torch::linear(run.batch({4, 6}, step), w); });
     }, .within = 1e-5, .because = kOrder},
    {.what = "DoRA, and the same written out", .act = [](Run& run) {
       const Options dora{.r = 2, .use_rslora = true, .use_dora = true};
       written_out(run, nn::Linear(6, 5), dora, [&](const auto& w, int step) { return torch::linear(run.batch({4, 6}, step), w); });
     }, .within = 1e-5, .because = kOrder},
    {.what = "an adapter of an embedding, and the same written out", .act = [](Run& run) {
       written_out(run, nn::Embedding(7, 4), kSmall, [&](const auto& w, int step) { return torch::embedding(w, some_words(run, step)); });
     }, .within = 1e-5, .because = kOrder},
    {.what = "an adapter of a convolution, and the same written out", .act = [](Run& run) {
       written_out(run, nn::Conv2d(nn::Conv2dOptions(4, 3, 3)), kSmall,
                   [&](const auto& w, int step) { return torch::conv2d(run.batch({2, 4, 6, 6}, step), w); });
     }, .within = 1e-5, .because = kOrder},
    // --- Layers ---
    {.what = "an embedding", .act = [](Run& run) {
       Words model;
       train_words(run, model, kWords);
     }},
    {.what = "an embedding with DoRA", .act = [](Run& run) {
       Words model;
       train_words(run, model, {.r = 2, .use_dora = true, .layers = {.target_modules = {"words"}}});
     }},
    {.what = "an embedding with an adapter that is the head, too: plain as a head", .act = [](Run& run) {
       Words model;
       model.head->weight = model.words->weight;
       train_words(run, model, kWords);
     }, .remark = "as in peft"},
    {.what = "a convolution, with `padding(same)` and a dilation", .act = [](Run& run) {
       train_conv(run, nn::Conv2dOptions(4, 3, 3).padding(torch::kSame).dilation(2), kConv);
     }},
    {.what = "a convolution with DoRA", .act = [](Run& run) {
       train_conv(run, nn::Conv2dOptions(4, 3, 3).padding(1), {.r = 2, .lora_alpha = 1, .use_dora = true, .layers = {.target_modules = {"0"}}});
     }},
    {.what = "a convolution with groups", .act = [](Run& run) { train_conv(run, nn::Conv2dOptions(4, 4, 3).padding(1).groups(2), kConv); }},
    {.what = "a convolution of one image, without a dimension for batches", .act = [](Run& run) {
       nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(4, 3, 3)));
       fill(*model);
       adapt(*model, {.r = 2, .lora_alpha = 1, .use_dora = true, .layers = {.target_modules = {"0"}}});
       run.shard(model);
       run.train(*model, [&](int step) { return model->forward(run.batch({4, 6, 6}, step)).pow(2).mean(); }, run.sgd(*model));
     }},
    {.what = "a convolution with circular padding", .act = [](Run& run) {
       train_conv(run, nn::Conv2dOptions(4, 3, 3).padding(1).padding_mode(torch::kCircular), kConv);
     }},
    {.what = "a transformer layer of libtorch, `self_attn.out_proj` too", .act = [](Run& run) {
       nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(6, 2).dim_feedforward(5).dropout(0));
       fill(*layer);
       adapt(*layer, {.r = 2, .layers = {.target_modules = {"linear1", "linear2", "out_proj"}}});
       run.shard(layer);
       run.train(*layer, [&](int step) { return layer(run.batch({3, 2, 6}, step)).abs().mean(); }, run.sgd(*layer));
     }},
    {.what = "inputs of one and of three dimensions", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         return net->forward(run.batch({6}, step)).pow(2).mean() + net->forward(run.batch({2, 3, 6}, step)).abs().mean();
       }, run.adamw(*net));
     }},
    {.what = "a batch without rows", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         return loss_of(run, *net, step) + net->forward(torch::zeros({0, 6})).sum();
       }, run.adamw(*net));
     }},
    {.what = "a layer that is called in a loop", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         auto h = torch::tanh(net->first(run.batch({4, 6}, step)));
         for (int i = 0; i <= step; i++) h = torch::tanh(net->second(h));
         return net->head(h).pow(2).mean();
       }, run.adamw(*net));
     }},
    {.what = "a layer that some passes leave out", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         auto h = torch::tanh(net->first(run.batch({4, 6}, step)));
         if (step % 2 == 0) h = torch::tanh(net->second(h));
         return net->head(h).pow(2).mean();
       }, run.adamw(*net));
     }},
    {.what = "in segments that run again in backward", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .use_dora = true});
       const auto body = [&](const at::Tensor& x) { return net->hidden(x); };
       run.train(*net, [&](int step) {
         const auto x = run.batch({4, 6}, step);
         return net->head(run.sharded() ? activation::checkpoint(body, x) : body(x)).pow(2).mean();
       }, run.adamw(*net));
     }},
    {.what = "a copy of a layer's holder, and a `LinearImpl` that is copied", .act = [](Run& run) {
       const auto net = adapted(run);
       auto holder = net->first;
       nn::LinearImpl copied = *net->second;
       run.train(*net, [&](int step) {
         return net->head(torch::tanh(copied.forward(torch::tanh(holder(run.batch({4, 6}, step)))))).pow(2).mean();
       }, run.adamw(*net));
     }},
    // --- The weight, used by the program itself ---
    functional("`torch::linear(x, layer->weight, layer->bias)`",
               [](const auto& x, auto& layer) { return torch::linear(x, layer->weight, layer->bias); }),
    functional("`torch::matmul(x, layer->weight.t())`",
               [](const auto& x, auto& layer) { return torch::matmul(x, layer->weight.t()) + layer->bias; }),
    functional("`x.mm(layer->weight.t())`", [](const auto& x, auto& layer) { return x.mm(layer->weight.t()) + layer->bias; }),
    functional("`torch::addmm(layer->bias, x, layer->weight.t())`",
               [](const auto& x, auto& layer) { return torch::addmm(layer->bias, x, layer->weight.t()); }),
    functional("`x.mm(layer->weight.transpose(0, 1))`, `einsum`: the base alone",
               [](const auto& x, auto& layer) {
                 return x.mm(layer->weight.transpose(0, 1)) + torch::einsum("bi,oi->bo", {x, layer->weight});
               },
               "an adapter acts in linear, and in products with `weight.t()`; other operators see the weight of the base, as in peft"),
    functional("`torch::linear(x, layer->weight * mask)`, `layer->weight.detach()`: the base alone",
               [](const auto& x, auto& layer) { return torch::linear(x, layer->weight * 0.5) + torch::linear(x, layer->weight.detach()); },
               "the same"),
    functional("an autoencoder, whose decoder is the encoder's weight: `torch::linear(h, layer->weight.t())`, of the base",
               [](const auto& x, auto& layer) {
                 const auto h = torch::tanh(layer(x));
                 return h + torch::linear(torch::linear(h, layer->weight.t()), layer->weight);
               }),
    {.what = "an operator that is none of the layer's: `torch::embedding(linear->weight, index)`", .act = [](Run& run) {
       const auto net = adapted(run);
       torch::embedding(net->first->weight, torch::tensor({1}));
     }, .refused = "has an adapter, which acts in aten::linear, but aten::embedding uses its weight"},
    {.what = "a penalty on the weight, `layer->weight.norm()`", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         return loss_of(run, *net, step) + 0.1 * net->first->weight.norm() + 0.01 * net->second->weight.pow(2).sum();
       }, run.adamw(*net));
     }},
    {.what = "a weight of the base that is read: `sum()`, one value, `operator<<`", .act = [](Run& run) {
       const auto net = adapted(run);
       const torch::NoGradGuard no_grad;
       run.record(net->first->weight.sum());
       run.record(net->first->weight[1][2].item<double>());
       run.record(net->second->weight.data().abs().max());
       std::ostringstream text;
       text << net->head->weight << net->first->weight;
       run.record(sum_of(text.str()));
     }, .remark = "all ranks have to read"},
    // --- What trains ---
    {.what = "an optimizer over those that train", .act = [](Run& run) {
       const auto net = adapted(run);
       const auto trained = that_train(run.parameters(*net));
       run.record(static_cast<double>(trained.size()));
       train(run, *net, run.adamw(trained));
     }},
    {.what = "the names of what trains, and their number", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .use_dora = true, .bias = lora::Bias::LoraOnly});
       double count = 0;
       for (const auto& item : net->named_parameters()) {
         if (!item.value().requires_grad()) continue;
         run.record(sum_of(item.key()));
         count += static_cast<double>(run.sharded() ? c10::multiply_integers(shard_info(item.value())->shape) : item.value().numel());
       }
       run.record(count);
     }, .remark = "a shard's own `numel()` is that of this rank's part"},
    {.what = "an adapter's values by name, `named_parameters()[\"first.lora_B.default.weight\"]`, scaled in mid-run", .act = [](Run& run) {
       const auto net = adapted(run);
       train_around(run, *net, run.adamw(*net), [&](int step) {
         const torch::NoGradGuard no_grad;
         if (step == 2) net->named_parameters()["first.lora_B.default.weight"].mul_(0.5);
       });
     }},
    {.what = "LoRA+: another rate for B", .act = [](Run& run) {
       const auto net = adapted(run);
       train(run, *net, of_a_and_b(run, *net, 0.08, 0));
     }},
    {.what = "weight decay of A only", .act = [](Run& run) {
       const auto net = adapted(run);
       train(run, *net, of_a_and_b(run, *net, 0.01, 0.5));
     }},
    {.what = "LoRA-FA: A is frozen, B trains", .act = [](Run& run) {
       const auto net = adapted(run);
       for (auto& p : parameters_of(run, *net, "lora_A")) p.set_requires_grad(false);
       train_around(run, *net, run.adamw(*net), {});
     }},
    {.what = "A and B train in turns", .act = [](Run& run) {
       const auto net = adapted(run);
       train_around(run, *net, run.adamw(*net), [&](int step) {
         for (auto& p : parameters_of(run, *net, "lora_A")) p.set_requires_grad(step % 2 == 0);
         for (auto& p : parameters_of(run, *net, "lora_B")) p.set_requires_grad(step % 2 == 1);
       });
     }},
    {.what = "the base thaws in mid-run, and trains beside its adapters", .act = [](Run& run) {
       const auto net = adapted(run);
       train_around(run, *net, run.adamw(*net), [&](int step) {
         if (step == 2) tessera::set_requires_grad(*net, Training::Trained);
       });
     }},
    {.what = "gradients accumulated over three passes", .act = [](Run& run) {
       const auto net = adapted(run);
       const auto optimizer = run.adamw(*net);
       for (int step = 0; step < 3; step++) {
         for (int pass = 0; pass < 3; pass++) run.backward(loss_of(run, *net, 3 * step + pass) / 3);
         run.record_gradients(run.parameters(*net));
         optimizer.step();
         optimizer.zero_grad();
       }
       run.record_parameters(*net);
     }},
    {.what = "gradients clipped by their norm", .act = [](Run& run) {
       const auto net = adapted(run);
       train_around(run, *net, run.sgd(*net), {}, [&](int) {
         const auto parameters = run.parameters(*net);
         run.record(run.sharded() ? clip_grad_norm(parameters, 0.01).item<double>() : nn::utils::clip_grad_norm_(parameters, 0.01));
       });
     }, .within = 1e-5, .because = kNormRounds},
    {.what = "a scaled loss, by `optim::GradScaler`", .act = [](Run& run) {
       const auto net = adapted(run);
       const auto optimizer = run.adamw(*net);
       optim::GradScaler scaler({.init_scale = 1024});
       for (int step = 0; step < 4; step++) {
         run.backward(scaler.scale(loss_of(run, *net, step)));
         optimizer.ours() != nullptr ? scaler.step(*optimizer.ours()) : scaler.step(*optimizer.theirs());
         scaler.update();
         optimizer.zero_grad();
       }
       run.record_parameters(*net);
     }},
    {.what = "an average of the adapters, `optim::Average`, and evaluations with it in place", .act = [](Run& run) {
       const auto net = adapted(run);
       optim::Average average(net, {.decay = 0.5});
       train_around(run, *net, run.adamw(*net), {}, [&](int) {
         average.update();
         const auto swapped = average.swapped();
         evaluate(run, *net);
       });
     }, .within = 1e-6, .because = kVectors},
    {.what = "evaluations under `NoGradGuard` and in `InferenceMode`", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .use_dora = true});
       train_around(run, *net, run.adamw(*net), [&](int) {
         evaluate(run, *net);
         const c10::InferenceMode inference;
         run.record(net->forward(run.batch({4, 6}, 30)).mul(2));
       });
     }},
    {.what = "each unit updated in backward, `optimizer.step_in_backward()`", .act = [](Run& run) {
       const auto net = adapted(run);
       const auto optimizer = run.adamw(*net);
       if (run.sharded() && optimizer.ours() != nullptr) optimizer.ours()->step_in_backward();
       train(run, *net, optimizer);
     }},
    {.what = "a hook on a parameter of an adapter", .act = [](Run& run) {
       const auto net = adapted(run);
       for (auto& p : parameters_of(run, *net, "lora_B")) p.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
       train_around(run, *net, run.sgd(*net), {});
     }},
    {.what = "a penalty on the gradient of the input (double backward)", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .use_dora = true});
       run.train(*net, [&](int step) {
         const auto x = run.batch({4, 6}, step).requires_grad_(true);
         const auto y = net->forward(x).pow(2).mean();
         return y + torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].pow(2).sum();
       }, run.adamw(*net));
     }},
    // --- Several adapters ---
    {.what = "two adapters that are trained in turns, `lora::set_adapters`", .act = [](Run& run) {
       const auto net = twice_adapted(run);
       train_around(run, *net, run.adamw(*net), [&](int step) { lora::set_adapters(*net, {step % 2 == 0 ? "other" : "default"}); });
     }},
    {.what = "two adapters that act together", .act = [](Run& run) {
       const auto net = twice_adapted(run);
       lora::set_adapters(*net, {"default", "other"});
       train_around(run, *net, run.adamw(*net), {});
     }},
    {.what = "an adapter that is named twice, `lora::set_adapters(model, {\"other\", \"other\"})`", .act = [](Run& run) {
       lora::set_adapters(*twice_adapted(run), {"other", "other"});
     }, .refused = "'other' is named twice"},
    {.what = "two adapters that act, of which one is frozen", .act = [](Run& run) {
       const auto net = twice_adapted(run);
       lora::set_adapters(*net, {"default", "other"});
       for (auto& item : net->named_parameters()) {
         if (is_of(item.key(), "other")) item.value().set_requires_grad(false);
       }
       train_around(run, *net, run.adamw(*net), {});
     }},
    {.what = "two adapters that train the head as a whole", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .modules_to_save = {"head"}});
       lora::apply(*net, {.r = 3, .modules_to_save = {"head"}}, "other");
     }, .refused = "'head' trains with adapter 'default' already"},
    {.what = "two adapters with biases", .act = [](Run& run) {
       const auto net = std::make_shared<Net>();
       adapt(*net, {.r = 2, .bias = lora::Bias::LoraOnly});
       adapt(*net, {.r = 3, .bias = lora::Bias::All}, "other");
       run.shard_nested(net);
     }, .refused = "biases train with adapter 'default' already", .remark = "as in peft"},
    {.what = "an adapter of rank 2^31", .act = [](Run& run) {
       Net net;
       lora::apply(net, {.r = int64_t{1} << 31});
       run.shard(net);
     }, .refused = "a rank of 2147483648 makes no sense"},
    {.what = "adapters of other layers, an optimizer for each", .act = [](Run& run) {
       const auto net = std::make_shared<Net>();
       adapt(*net, {.r = 2, .layers = {.target_modules = {"first"}}}, "one");
       adapt(*net, {.r = 3, .layers = {.target_modules = {"second", "head"}}}, "two");
       run.shard_nested(net);
       const Steps of_one = run.adamw(parameters_of(run, *net, "one")), of_two = run.sgd(parameters_of(run, *net, "two"));
       for (int round = 0; round < 3; round++) {
         lora::set_adapters(*net, {round % 2 == 0 ? "one" : "two"});
         train(run, *net, round % 2 == 0 ? of_one : of_two);
       }
     }},
    {.what = "an adapter switched between forward and backward", .act = [](Run& run) {
       const auto net = twice_adapted(run);
       for (int step = 0; step < 2; step++) {
         const auto loss = loss_of(run, *net, step);
         lora::set_adapters(*net, {step == 0 ? "other" : "default"});
         run.backward(loss);
         run.record(loss);
       }
       run.record_gradients(run.parameters(*net));
     }},
    {.what = "an adapter switched between forward and backward of a segment", .act = [](Run& run) {
       const auto net = twice_adapted(run);
       const auto x = run.batch({4, 6}).requires_grad_(true);
       const auto loss = activation::checkpoint([&](const at::Tensor& x) { return net->forward(x); }, x).pow(2).mean();
       lora::set_adapters(*net, {"other"});
       loss.backward();
     }, .refused = "did something else when it ran again in backward"},
    {.what = "`lora::Disabled` for the scores of the base, as in DPO", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         const auto x = run.batch({4, 6}, step);
         at::Tensor of_base;
         {
           const torch::NoGradGuard no_grad;
           const lora::Disabled disabled(*net);
           of_base = net->forward(x);
         }
         return preference(net->forward(x), of_base);
       }, run.adamw(*net));
     }},
    {.what = "the same behind the pass of the adapters, with gradients on", .act = [](Run& run) {
       const auto net = adapted(run);
       run.train(*net, [&](int step) {
         const auto x = run.batch({4, 6}, step);
         const auto own = net->forward(x);
         const lora::Disabled disabled(*net);
         return preference(own, net->forward(x));
       }, run.adamw(*net));
     }},
    {.what = "`lora::Disabled` where each part of a model has an adapter of its own", .act = [](Run& run) {
       struct Parts : nn::Module {
         std::shared_ptr<Net> encoder = register_module("encoder", std::make_shared<Net>()), decoder = register_module("decoder", std::make_shared<Net>());
         at::Tensor forward(const at::Tensor& x) { return decoder->forward(torch::tanh(encoder->forward(x)).repeat({1, 2})); }
       } model;
       adapt(model, kSmall, "one");
       adapt(model, {.r = 3}, "two");
       lora::set_adapters(*model.encoder, {"one"});
       lora::set_adapters(*model.decoder, {"two"});
       run.shard_nested(model);
       run.train(model, [&](int step) {
         const auto x = run.batch({4, 6}, step);
         if (run.sharded()) {
           const lora::Disabled disabled(model);
           run.record(model.forward(x).detach());
         } else {
           lora::set_adapters(model, {});
           run.record(model.forward(x).detach());
           lora::set_adapters(*model.encoder, {"one"});
           lora::set_adapters(*model.decoder, {"two"});
         }
         return model.forward(x).pow(2).mean();
       }, run.adamw(model));
     }},
    {.what = "backward of a segment after `lora::Disabled` has ended", .act = [](Run& run) {
       const auto net = adapted(run);
       at::Tensor y;
       {
         const lora::Disabled disabled(*net);
         y = activation::checkpoint([&](const at::Tensor& x) { return net->forward(x); }, run.batch({4, 6}).requires_grad_(true));
       }
       y.sum().backward();
     }, .refused = "did something else when it ran again in backward"},
    // --- Checkpoints that refer to the base ---
    {.what = "a checkpoint of what trains, of a base that is changed in place behind `checkpoint::base_of`", .act = [](Run& run) {
       const auto net = adapted(run);
       const Folder folder(run);
       const checkpoint::Contents contents{.model = net.get(), .base = checkpoint::base_of(*net, "a base")};
       {
         const torch::NoGradGuard no_grad;
         const auto whole = full_params(*net, Access::Write);
         net->second->weight.mul_(2);
       }
       checkpoint::save(folder.path, contents, run.world());
     }, .refused = "has changed since checkpoint::base_of"},
    {.what = "such a checkpoint, loaded over a base that is another one since", .act = [](Run& run) {
       const auto net = adapted(run);
       const Folder folder(run);
       checkpoint::Contents contents{.model = net.get(), .base = checkpoint::base_of(*net, "a base")};
       checkpoint::save(folder.path / "run", contents, run.world());
       auto state = checkpoint::full_state_dict(*net);
       for (auto& [name, value] : state) value = value + 1;
       checkpoint::load_full_state_dict(*net, state);
       checkpoint::load(folder.path / "run", contents, run.world());
     }, .refused = "has changed since checkpoint::base_of"},
    {.what = "such a checkpoint, loaded after steps", .act = [](Run& run) {
       const auto net = adapted(run);
       const Folder folder(run);
       checkpoint::Contents contents{.model = net.get(), .base = checkpoint::base_of(*net, "a base")};
       train(run, *net);
       checkpoint::save(folder.path / "run", contents, run.world());
       train(run, *net);
       checkpoint::load(folder.path / "run", contents, run.world());
       evaluate(run, *net);
       train(run, *net);
     }},
    // --- Merged, and taken out again ---
    {.what = "`lora::merge`, an evaluation, `lora::unmerge`, and training goes on", .act = [](Run& run) {
       const auto net = adapted(run);
       train(run, *net);
       lora::merge(*net);
       evaluate(run, *net);
       run.record_parameters(*net);
       lora::unmerge(*net);
       train(run, *net);
     }},
    {.what = "the same with DoRA, whose magnitudes are set after sharding, `lora::reset_magnitudes`", .act = [](Run& run) {
       const auto net = adapted(run, {.r = 2, .use_dora = true});
       lora::reset_magnitudes(*net);
       train(run, *net);
       lora::merge(*net);
       evaluate(run, *net);
       lora::unmerge(*net);
       train(run, *net);
     }},
    {.what = "a merged model is trained as a whole", .act = [](Run& run) {
       const auto net = adapted(run);
       lora::merge(*net);
       tessera::set_requires_grad(*net, Training::Trained);
       train_around(run, *net, run.adamw(*net), {});
     }},
    {.what = "an adapter that is merged, chosen by `lora::set_adapters`", .act = [](Run& run) {
       const auto net = twice_adapted(run);
       lora::merge(*net);
       lora::set_adapters(*net, {"default"});
     }, .refused = "adapters are merged into 'first'; unmerge them before"},
    {.what = "`lora::Disabled` while adapters are merged", .act = [](Run& run) {
       const auto net = adapted(run);
       lora::merge(*net);
       const lora::Disabled disabled(*net);
     }, .refused = "unmerge them before"},
    {.what = "`checkpoint::load_adapter` while adapters are merged, which `lora::unmerge` would take out", .act = [](Run& run) {
       const auto net = adapted(run);
       const Folder folder(run);
       checkpoint::save_adapter(*net, folder.path, run.world());
       run.world().barrier();
       lora::merge(*net);
       checkpoint::load_adapter(*net, folder.path);
     }, .refused = "merged"},
    {.what = "merged inside of `full_params` for writing", .act = [](Run& run) {
       const auto net = adapted(run);
       {
         const auto whole = full_params(*net, Access::Write);
         lora::merge(*net);
       }
       evaluate(run, *net);
       run.record_parameters(*net);
     }},
    {.what = "a convolution with groups, merged", .act = [](Run& run) {
       nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(4, 4, 3).groups(2)));
       adapt(*model, kConv);
       run.shard(model);
       lora::merge(*model);
     }, .refused = "a convolution with groups, whose adapters can't become a part of its weight"},
    // --- Dtypes ---
    {.what = "`model->to(torch::kDouble)` after `lora::apply`", .act = [](Run& run) {
       Net net;
       adapt(net);
       net.to(at::kDouble);
       run.shard_nested(net);
       run.train(net, [&](int step) { return net.forward(run.batch({4, 6}, step).to(at::kDouble)).pow(2).mean(); }, run.sgd(net));
     }},
    {.what = "a base in bfloat16, whose adapters are float32", .act = [](Run& run) {
       Net net;
       net.to(at::kBFloat16);
       adapt(net);
       run.shard_nested(net);
       run.train(net, [&](int step) { return net.forward(run.batch({4, 6}, step).to(at::kBFloat16)).to(at::kFloat).pow(2).mean(); }, run.sgd(net));
     }},
    {.what = "an evaluation with `param_dtype` of bfloat16, and of a model that was converted to it", .act = [](Run& run) {
       Net net;
       adapt(net, {.r = 2, .use_dora = true});
       if (!run.sharded()) net.to(at::kBFloat16);
       run.shard_nested(net, {.mesh = run.world(), .mixed_precision = {.param_dtype = at::kBFloat16}});
       const torch::NoGradGuard no_grad;
       run.record(net.forward(run.batch({4, 6}).to(at::kBFloat16)));
     }},
    {.what = "autocast to bfloat16", .act = [](Run& run) {
       const auto net = adapted(run);
       const auto loss = [&](int step) {
         const Autocast autocast;
         return net->forward(run.batch({4, 6}, step)).to(at::kFloat).pow(2).mean();
       };
       run.train(*net, loss, run.sgd(*net));
     }},
    // --- Made, shared and kept ---
    {.what = "within `deferred_init`", .act = [](Run& run) {
       const auto net = deferred_init([] {
         auto made = std::make_shared<Net>();
         adapt(*made);
         return made;
       });
       if (!run.sharded()) materialize(*net);
       run.shard_nested(net);
       train(run, *net);
     }},
    {.what = "adapters of which every rank keeps a whole copy, `.replicated`", .act = [](Run& run) {
       Net net;
       adapt(net);
       run.shard(net, {.mesh = run.world(), .replicated = that_train(net.parameters())});
       train(run, net);
     }},
    {.what = "`lora::apply` on one rank only", .act = [](Run& run) {
       Net net;
       if (run.rank() == 0) lora::apply(net, kSmall);
       run.shard(net);
     }, .refused = "parameter 'first.weight' of Float [5, 6], frozen"},
    {.what = "ranks that differ from rank to rank", .act = [](Run& run) {
       Net net;
       lora::apply(net, {.r = 1 + run.rank()});
       run.shard(net);
     }, .refused = "lora_A.default.weight"},
    {.what = "an adapter saved by `checkpoint::save_adapter`, and loaded into another model", .act = [](Run& run) {
       const auto net = adapted(run), other = adapted(run, {.r = 2, .lora_alpha = 3, .layers = {.target_modules = {"first", "second"}}});
       train(run, *net);
       const Folder folder(run);
       checkpoint::save_adapter(*net, folder.path, run.world());
       run.world().barrier();
       checkpoint::load_adapter(*other, folder.path);
       run.world().barrier();
       evaluate(run, *other);
       train(run, *other);
     }},
    {.what = "`full_state_dict` of a model with adapters, loaded into one that is sharded otherwise", .act = [](Run& run) {
       const auto net = adapted(run);
       train(run, *net);
       Net next;
       lora::apply(next, kSmall);
       run.shard(next);
       checkpoint::load_full_state_dict(next, checkpoint::full_state_dict(*net));
       train(run, next);
     }},
    {.what = "`torch::save` of a model with adapters", .act = [](Run& run) {
       const auto net = adapted(run);
       std::stringstream file;
       torch::save(net, file);
     }, .refused = "would write this rank's part of"},
    {.what = "`clone()` of a layer with an adapter", .act = [](Run& run) {
       const auto net = adapted(run);
       net->first->clone();
     }, .refused = "clone"},
    {.what = "`torch::save` and `torch::load` of a model with adapters, before sharding", .act = [](Run& run) {
       auto net = std::make_shared<Net>();
       adapt(*net);
       if (run.sharded()) {
         std::stringstream file;
         torch::save(net, file);
         net = std::make_shared<Net>();
         lora::apply(*net, kSmall);
         torch::load(net, file);
       }
       run.shard_nested(net);
       train(run, *net);
     }},
    // --- What comes too late, or twice ---
    {.what = "`lora::apply` after `fully_shard`", .act = [](Run& run) {
       Net net;
       run.shard(net);
       lora::apply(net, kSmall);
       train(run, net);
     }, .refused = "before fully_shard"},
    {.what = "the same adapter applied again", .act = [](Run& run) {
       Net net;
       adapt(net);
       adapt(net);
       run.shard(net);
     }, .refused = "'first' has an adapter 'default' already"},
    {.what = "two layers that have one weight", .act = [](Run& run) {
       Net net;
       net.head->weight = net.second->weight;
       lora::apply(net, {.r = 2, .layers = {.target_modules = {"second", "head"}}});
       run.shard(net);
     }, .refused = "'second' and 'head' share a weight"},
    {.what = "an adapter that is not there, `lora::set_adapters`", .act = [](Run& run) {
       lora::set_adapters(*adapted(run), {"french"});
     }, .refused = "the model has no adapter 'french'; it has: default"},
    {.what = "a layer that is not there", .act = [](Run& run) {
       adapted(run, {.layers = {.target_modules = {"q_proj"}}});
     }, .refused = "no layer is named 'q_proj'; layers for which it can be are named: first, second, head"},
  }};
}

}  // namespace tessera::idioms::adapters
