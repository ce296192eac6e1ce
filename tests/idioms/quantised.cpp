// Weights that nn::quantize holds in few bits. In the plain run with torch's optimizers they are ordinary weights, rounded by hand: so the
// numbers are also those of a program that knows nothing of quantisation.
#include <c10/core/InferenceMode.h>

#include <limits>
#include <sstream>

#include "idiom.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/quantize.h"
#include "tessera/optim/average.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/training.h"

namespace tessera::idioms::quantised {
namespace {

namespace nn = torch::nn;
using tessera::nn::Quantization;

constexpr auto kFused = "a bias is added to the product, and not within it";
constexpr auto kNormRounds = "a norm over shards is added in another order";

/// 70 -> 33 -> 33 -> 3: neither blocks nor ranks divide the sizes.
struct Net : nn::Module {
  nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  explicit Net(bool bias = false) {
    const auto layer = [&](const std::string& name, int64_t in, int64_t out) {
      return register_module(name, nn::Linear(nn::LinearOptions(in, out).bias(bias)));
    };
    first = layer("first", 70, 33);
    second = layer("second", 33, 33);
    head = layer("head", 33, 3);
    fill(*this);
  }
  at::Tensor hidden(const at::Tensor& x) { return torch::tanh(second(torch::tanh(first(x)))); }
  at::Tensor forward(const at::Tensor& x) { return head(hidden(x)); }
};

bool by_hand(const Run& run) {
  return !run.sharded() && run.setting().optimizer == By::Torch;
}

void round(nn::Linear& layer, Quantization kind) {
  const torch::NoGradGuard no_grad;
  auto& weight = layer->weight;
  weight.copy_(tessera::nn::dequantized(kind, tessera::nn::quantized(kind, weight), weight.sizes(), at::kFloat));
  weight.set_requires_grad(false);
}

void quantise(const Run& run, Net& net, Quantization kind = Quantization::Nf4) {
  if (!by_hand(run)) return tessera::nn::quantize(net, {.quantization = kind});
  round(net.first, kind);
  round(net.second, kind);
}

struct Made {
  Quantization kind = Quantization::Nf4;
  bool bias = false;
  std::optional<lora::Options> adapter = {};
};
std::shared_ptr<Net> made(Run& run, const Made& of = {}) {
  const auto net = std::make_shared<Net>(of.bias);
  quantise(run, *net, of.kind);
  if (of.adapter) lora::apply(*net, *of.adapter);
  return net;
}
std::shared_ptr<Net> sharded(Run& run, const Made& of = {}) {
  const auto net = made(run, of);
  run.shard_nested(net);
  return net;
}
const lora::Options kAdapter{.r = 4};

at::Tensor input_of(const Run& run, int step) {
  return run.batch({4, 70}, step);
}

/// The usual loop. Frozen weights have other forms in the plain run, so it records only what trains.
void train(Run& run, Net& net, const Steps& optimizer, const std::function<at::Tensor(int step)>& loss,
           const std::function<void()>& before_step = {}) {
  for (int step = 0; step < 3; step++) {
    const auto value = loss(step);
    run.backward(value);
    if (before_step) before_step();
    optimizer.step();
    optimizer.zero_grad();
    run.record(value);
  }
  for (const auto& p : run.parameters(net)) {
    if (p.requires_grad()) run.record(run.sharded() ? full_parameter(p) : p);
  }
}
void train(Run& run, Net& net, const std::function<at::Tensor(int step)>& loss) {
  train(run, net, run.adamw(net), loss);
}
void train(Run& run, Net& net) {
  train(run, net, [&](int step) { return net.forward(input_of(run, step)).pow(2).mean(); });
}

void evaluate(Run& run, Net& net) {
  const torch::NoGradGuard no_grad;
  run.record(net.forward(input_of(run, 20)));
}

Idiom trained(const std::string& what, const Made& of, double within = 0, const std::string& because = {}) {
  return {.what = what,
          .act =
              [of](Run& run) {
                const auto net = sharded(run, of);
                train(run, *net);
              },
          .within = within,
          .because = because};
}

/// A loss of another use of the model, or of its weights.
using Use = std::function<at::Tensor(Net& net, const at::Tensor& x)>;
Idiom used(const std::string& what, const Use& use, const std::string& remark = {}) {
  return {.what = what,
          .act =
              [use](Run& run) {
                const auto net = sharded(run);
                train(run, *net, [&](int step) { return use(*net, input_of(run, step)).pow(2).mean(); });
              },
          .remark = remark};
}

/// Something that is computed of the weights alone.
Idiom read(const std::string& what, const std::function<at::Tensor(const at::Tensor& weight)>& look, const std::string& remark = {}) {
  return {.what = what,
          .act =
              [look](Run& run) {
                const auto net = sharded(run);
                run.record(look(net->first->weight));
                run.record(look(net->second->weight));
              },
          .remark = remark};
}

Idiom refused(const std::string& what, const std::function<void(Net& net)>& act, const std::string& error, const std::string& remark = {}) {
  return {.what = what, .act = [act](Run& run) { act(*sharded(run)); }, .refused = error, .remark = remark};
}

}  // namespace

Chapter chapter() {
  constexpr auto kAnotherForm = "would write a weight that is held in another form and frozen";
  constexpr auto kNoMemory = "a weight that is held in another form has no memory of its own";
  return {.title = "Quantised weights", .idioms = {
    trained("NF4: the head trains", {}),
    trained("NF4 with scales in float32", {.kind = Quantization::Nf4Single}),
    trained("int8", {.kind = Quantization::Int8}),
    trained("fp8", {.kind = Quantization::Fp8}),
    trained("with biases, which train", {.bias = true}, 1e-5, kFused),
    {.what = "the whole model one unit, which has bytes and floats", .act = [](Run& run) {
       const auto net = made(run, {.kind = Quantization::Fp8, .adapter = kAdapter});
       run.shard(net);
       train(run, *net);
     }},
    {.what = "a weight that is smaller than a block, and has no values for some ranks", .act = [](Run& run) {
       nn::Sequential model(nn::Linear(nn::LinearOptions(3, 2).bias(false)), nn::Linear(2, 1));
       fill(*model);
       if (by_hand(run)) {
         nn::Linear layer(model->ptr<nn::LinearImpl>(0));
         round(layer, Quantization::Int8);
       } else {
         tessera::nn::quantize(model, {.quantization = Quantization::Int8, .layers = {.target_modules = {"0"}}});
       }
       run.shard_nested(model);
       for (int step = 0; step < 3; step++) run.record(model->forward(run.batch({4, 3}, step)));
     }},
    // --- Adapters beside them ---
    trained("QLoRA: adapters beside weights in NF4", {.adapter = kAdapter}),
    trained("adapters beside weights in int8, with biases that train", {.kind = Quantization::Int8, .bias = true,
            .adapter = lora::Options{.r = 4, .bias = lora::Bias::All}}),
    trained("rsLoRA, and the head trains as a whole", {.adapter = lora::Options{.r = 4, .use_rslora = true, .modules_to_save = {"head"}}}),
    {.what = "DoRA, whose magnitudes are set after sharding", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = lora::Options{.r = 4, .use_dora = true}});
       lora::reset_magnitudes(*net);
       train(run, *net);
     }},
    {.what = "`lora::Disabled` for scores of the base", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = kAdapter});
       train(run, *net, [&](int step) {
         const auto x = input_of(run, step);
         const auto own = net->forward(x);
         const lora::Disabled disabled(*net);
         return (own - net->forward(x)).pow(2).mean() + own.pow(2).mean();
       });
     }},
    {.what = "`lora::merge` into quantised weights", .act = [](Run& run) {
       lora::merge(*sharded(run, {.adapter = kAdapter}));
     }, .refused = "so no adapter can be merged into it"},
    {.what = "PiSSA of quantised weights", .act = [](Run& run) {
       sharded(run, {.adapter = lora::Options{.r = 4, .init_lora_weights = lora::Init::Pissa}});
     }, .refused = "PiSSA computes the adapter from the weight, which has no values yet, or is quantised"},
    // --- Inputs ---
    used("an input of three dimensions", [](Net& net, const at::Tensor& x) { return net.forward(x.view({2, 2, 70})); }),
    used("an input of one dimension", [](Net& net, const at::Tensor& x) { return net.forward(x[1]); }),
    used("an input without rows", [](Net& net, const at::Tensor& x) { return net.forward(x.slice(0, 0, 0)).sum() + net.forward(x); }),
    used("an input that is no contiguous matrix", [](Net& net, const at::Tensor& x) { return net.forward(x.t().contiguous().t()); }),
    refused("an input of integers", [](Net& net) { net.forward(torch::ones({4, 70}, at::kLong)); }, "same dtype", "by libtorch"),
    used("the gradient of the input, and of its gradient (double backward)", [](Net& net, const at::Tensor& x) {
      const auto input = x.clone().requires_grad_(true);
      const auto y = net.forward(input).pow(2).sum();
      return y + torch::autograd::grad({y}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].pow(2).sum();
    }),
    {.what = "everything frozen, gradients of the input (adversarial examples)", .act = [](Run& run) {
       const auto net = made(run);
       for (auto& p : net->parameters()) p.set_requires_grad(false);
       run.shard_nested(net);
       auto x = input_of(run, 0);
       for (int step = 0; step < 3; step++) {
         x = x.detach().requires_grad_(true);
         net->forward(x).pow(2).mean().backward();
         run.record(x.grad());
         x = x + x.grad().sign() * 0.125;
       }
     }},
    // --- Passes ---
    used("a layer that is called in a loop", [](Net& net, const at::Tensor& x) {
      auto h = torch::tanh(net.first(x));
      for (int i = 0; i < 3; i++) h = torch::tanh(net.second(h));
      return net.head(h);
    }),
    {.what = "in segments that run again in backward", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = kAdapter});
       const auto body = [&](const at::Tensor& x) { return net->hidden(x); };
       train(run, *net, [&](int step) {
         const auto x = input_of(run, step);
         return net->head(run.sharded() ? activation::checkpoint(body, x) : body(x)).pow(2).mean();
       });
     }},
    {.what = "evaluations under `NoGradGuard` and in `InferenceMode`", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = kAdapter});
       train(run, *net, run.sgd(*net), [&](int step) { return net->forward(input_of(run, step)).pow(2).mean(); }, [&] {
         evaluate(run, *net);
         const c10::InferenceMode inference;
         run.record(net->forward(input_of(run, 30)).mul(2));
       });
     }},
    {.what = "gradients clipped by their norm", .act = [](Run& run) {
       const auto net = sharded(run);
       train(run, *net, run.sgd(*net), [&](int step) { return net->forward(input_of(run, step)).pow(2).mean(); }, [&] {
         const auto all = run.parameters(*net);
         run.record(run.sharded() ? clip_grad_norm(all, 0.01).item<double>() : nn::utils::clip_grad_norm_(all, 0.01));
       });
     }, .within = 1e-5, .because = kNormRounds},
    {.what = "an average of what there is, `optim::Average`, and evaluations with it in place", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = kAdapter});
       optim::Average average(net, {.decay = 0.5});
       train(run, *net, run.sgd(*net), [&](int step) { return net->forward(input_of(run, step)).pow(2).mean(); }, [&] {
         average.update();
         const auto swapped = average.swapped();
         evaluate(run, *net);
       });
     }, .within = 1e-6, .because = "shards end where vector instructions do not"},
    // --- Weights that the program uses itself ---
    used("`torch::linear(x, layer->weight)`", [](Net& net, const at::Tensor& x) { return net.head(torch::linear(x, net.first->weight)); }),
    used("`torch::matmul(x, layer->weight.t())`", [](Net& net, const at::Tensor& x) { return net.head(torch::matmul(x, net.first->weight.t())); }),
    used("`x.mm(layer->weight.transpose(0, 1))`", [](Net& net, const at::Tensor& x) {
      return net.head(x.mm(net.first->weight.transpose(0, 1)));
    }),
    used("`einsum`, `bmm` of a stack of weights", [](Net& net, const at::Tensor& x) {
      const auto h = torch::einsum("bi,oi->bo", {x, net.first->weight});
      return net.head(torch::bmm(torch::stack({h, h}), torch::stack({net.second->weight, net.second->weight}))[1]);
    }),
    used("`torch::linear(x, layer->weight * mask)`, `layer->weight.detach()`", [](Net& net, const at::Tensor& x) {
      return net.head(torch::linear(x, net.first->weight * 0.5) + torch::linear(x, net.first->weight.detach()));
    }),
    used("an autoencoder whose decoder is the encoder's weight, `torch::linear(h, layer->weight.t())`", [](Net& net, const at::Tensor& x) {
      return net.forward(torch::linear(torch::tanh(net.first(x)), net.first->weight.t()));
    }),
    // --- Weights that are read ---
    read("its norm, and its largest value", [](const at::Tensor& weight) { return weight.norm() + weight.abs().max(); }),
    read("`weight.sum()`, `weight.std()`", [](const at::Tensor& weight) { return torch::stack({weight.sum(), weight.std()}); }),
    read("`weight.to(torch::kDouble)`, `weight.to(torch::kBFloat16)`",
         [](const at::Tensor& weight) { return weight.to(at::kDouble) - weight.to(at::kBFloat16); }),
    read("`weight.clone()`, `weight.contiguous()`, `weight.cpu()`",
         [](const at::Tensor& weight) { return weight.clone() + weight.contiguous() + weight.cpu(); }),
    read("a row, some columns, one value", [](const at::Tensor& weight) {
      return weight[2].sum() + weight.slice(1, 3, 7).sum() + weight[1][2].item<float>();
    }),
    read("`torch::cat` of weights, `_foreach_norm` of a list", [](const at::Tensor& weight) {
      return torch::cat({weight, weight.t().contiguous().view(weight.sizes())}) * torch::_foreach_norm({weight, weight})[1];
    }),
    {.what = "`tessera::full_tensor(model, \"first.weight\")`: what is held, bytes", .act = [](Run& run) {
       const auto net = sharded(run);
       const auto held = tessera::nn::quantized(Quantization::Nf4, Net().first->weight.detach());
       run.record(by_hand(run) ? held : full_tensor(*net, "first.weight"));
     }},
    read("its sizes, dtype and `requires_grad()`", [](const at::Tensor& weight) {
      return torch::tensor({weight.size(0), weight.numel(), static_cast<int64_t>(weight.scalar_type()), static_cast<int64_t>(weight.requires_grad())});
    }),
    {.what = "printed, `operator<<`", .act = [](Run& run) {
       const auto net = sharded(run);
       std::ostringstream text;
       text << net->first->weight;
       double sum = 0;
       for (const char c : text.str()) sum = 0.5 * sum + c;
       run.record(sum);
     }},
    {.what = "the values within `tessera::full_params`", .act = [](Run& run) {
       const auto net = sharded(run);
       const auto whole = full_params(*net, Access::Read);
       run.record(net->first->weight * 2);
     }},
    {.what = "a penalty on its weights in the loss", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = kAdapter});
       train(run, *net, [&](int step) { return net->forward(input_of(run, step)).pow(2).mean() + 0.1 * net->first->weight.pow(2).mean(); });
     }},
    refused("`layer->weight.data()`", [](Net& net) { (net.first->weight.data() * 2).sum(); }, kNoMemory, "`detach()` works"),
    refused("`layer->weight.data_ptr()`, an accessor", [](Net& net) { net.first->weight.data_ptr(); }, kNoMemory),
    refused("`torch::save(layer->weight)`", [](Net& net) {
      std::stringstream file;
      torch::save(net.first->weight, file);
    }, kNoMemory, "`layer->weight.clone()` can be saved"),
    // --- Weights that are written, thawed or converted ---
    refused("`layer->weight.mul_(0.5)` under `NoGradGuard`", [](Net& net) {
      const torch::NoGradGuard no_grad;
      net.first->weight.mul_(0.5);
    }, kAnotherForm),
    refused("`layer->weight.copy_(values)`, `layer->reset_parameters()`", [](Net& net) { net.first->reset_parameters(); }, kAnotherForm),
    refused("`layer->weight.set_data(values)`", [](Net& net) { net.first->weight.set_data(values({33, 70})); }, "set_data"),
    refused("`tessera::set_requires_grad` of the whole model, to train it", [](Net& net) { tessera::set_requires_grad(net, Training::Trained); },
            "Only Tensors of floating point and complex dtype can require gradients", "by libtorch"),
    refused("`p.set_requires_grad(true)` on what `parameters()` lists", [](Net& net) {
      for (auto& p : net.parameters()) p.set_requires_grad(true);
    }, "Only Tensors of floating point and complex dtype can require gradients", "by libtorch"),
    refused("`layer->weight.set_requires_grad(true)` on a member", [](Net& net) {
      net.first->weight.set_requires_grad(true);
      net.forward(torch::ones({4, 70})).sum().backward();
    }, "held as nf4"),
    {.what = "`model->to(torch::kBFloat16)` after `nn::quantize`, and a pass", .act = [](Run& run) {
       const auto net = made(run);
       net->to(at::kBFloat16);
       run.shard_nested(net);
       net->forward(input_of(run, 0).to(at::kBFloat16));
     }, .refused = "convert a model before it is quantised"},
    {.what = "ordinary weights, read by `torch::load` into a quantised model", .act = [](Run& run) {
       std::stringstream file;
       torch::save(std::make_shared<Net>(), file);
       auto net = made(run);
       torch::load(net, file);
       run.shard_nested(net);
       net->forward(input_of(run, 0));
     }, .refused = "read ordinary weights with checkpoint::load_weights"},
    {.what = "`modules_to_save` with a layer that is quantised", .act = [](Run& run) {
       sharded(run, {.adapter = lora::Options{.r = 4, .layers = {.target_modules = {"first"}}, .modules_to_save = {"second"}}});
     }, .refused = "leave it out of QuantizeOptions::layers"},
    {.what = "`layer->weight.set_requires_grad(false)` of all, once more", .act = [](Run& run) {
       const auto net = sharded(run, {.adapter = kAdapter});
       net->first->weight.set_requires_grad(false);
       net->second->weight.set_requires_grad(false);
       train(run, *net);
     }},
    {.what = "`model->to(torch::kCPU)` and `model->train()`, which change nothing", .act = [](Run& run) {
       const auto net = made(run, {.adapter = kAdapter});
       net->to(at::kCPU);
       net->eval();
       net->train();
       run.shard_nested(net);
       train(run, *net);
     }},
    {.what = "autocast to bfloat16", .act = [](Run& run) {
       const auto net = sharded(run);
       train(run, *net, [&](int step) {
         const Autocast autocast;
         return net->forward(input_of(run, step)).to(at::kFloat).pow(2).mean();
       });
     }},
    {.what = "an input in bfloat16: weights are computed in it", .act = [](Run& run) {
       const auto net = sharded(run);
       const torch::NoGradGuard no_grad;
       const auto x = input_of(run, 0).to(at::kBFloat16);
       run.record(torch::linear(x, by_hand(run) ? net->first->weight.to(at::kBFloat16) : net->first->weight));
     }},
    {.what = "`param_dtype` of bfloat16", .act = [](Run& run) {
       const auto net = made(run);
       run.shard_nested(net, {.mesh = run.world(), .mixed_precision = {.param_dtype = at::kBFloat16}});
       const auto narrow = [&](const at::Tensor& tensor) { return run.sharded() ? tensor : tensor.to(at::kBFloat16); };
       train(run, *net, [&](int step) {
         auto h = input_of(run, step).to(at::kBFloat16);
         for (const auto* const layer : {&net->first, &net->second, &net->head}) h = torch::linear(h, narrow((*layer)->weight));
         return h.to(at::kFloat).pow(2).mean();
       });
     }},
    {.what = "a model in bfloat16, quantised then", .act = [](Run& run) {
       const auto net = std::make_shared<Net>();
       net->to(at::kBFloat16);
       quantise(run, *net);
       run.shard_nested(net);
       train(run, *net, [&](int step) { return net->forward(input_of(run, step).to(at::kBFloat16)).to(at::kFloat).pow(2).mean(); });
     }},
    // --- Made, kept, shared ---
    {.what = "quantised within `deferred_init`: values are computed while the model is sharded", .act = [](Run& run) {
       const auto net = deferred_init([&] {
         auto inside = std::make_shared<Net>();
         if (!by_hand(run)) quantise(run, *inside);
         return inside;
       });
       if (!run.sharded()) materialize(*net);
       if (by_hand(run)) quantise(run, *net);
       run.shard_nested(net);
       train(run, *net);
     }},
    {.what = "quantised after `deferred_init`, with adapters", .act = [](Run& run) {
       const auto net = deferred_init([] { return std::make_shared<Net>(); });
       if (by_hand(run)) materialize(*net);
       quantise(run, *net);
       lora::apply(*net, kAdapter);
       if (!run.sharded() && !by_hand(run)) materialize(*net);
       run.shard_nested(net);
       train(run, *net);
     }},
    {.what = "`full_state_dict` of a quantised model, loaded into one that is sharded otherwise", .act = [](Run& run) {
       const auto net = sharded(run);
       train(run, *net);
       const auto next = std::make_shared<Net>();
       {
         const torch::NoGradGuard no_grad;
         for (auto& p : next->parameters()) p.mul_(0.5);
       }
       quantise(run, *next);
       run.shard(next);
       checkpoint::load_full_state_dict(*next, checkpoint::full_state_dict(*net));
       evaluate(run, *next);
       train(run, *next);
     }},
    {.what = "`full_state_dict` of a model that is not quantised, loaded into one that is", .act = [](Run& run) {
       Net source;
       const auto state = checkpoint::full_state_dict(source);
       const auto net = std::make_shared<Net>();
       {
         const torch::NoGradGuard no_grad;
         for (auto& p : net->parameters()) p.mul_(0.5);
       }
       if (by_hand(run)) checkpoint::load_full_state_dict(*net, state);
       quantise(run, *net);
       run.shard_nested(net);
       if (!by_hand(run)) checkpoint::load_full_state_dict(*net, state);
       train(run, *net);
     }, .remark = "what is read is quantised"},
    {.what = "the embedding is the head, and the head is quantised", .act = [](Run& run) {
       struct Tied : nn::Module {
         nn::Embedding words = register_module("words", nn::Embedding(35, 70));
         nn::Linear top = register_module("top", nn::Linear(nn::LinearOptions(70, 35).bias(false)));
         at::Tensor scale = register_parameter("scale", torch::ones({70}));
         Tied() {
           fill(*this);
           top->weight = words->weight;
         }
       };
       const auto model = std::make_shared<Tied>();
       if (by_hand(run)) {
         round(model->top, Quantization::Nf4);
       } else {
         tessera::nn::quantize(model);
       }
       run.shard(model);
       const auto optimizer = run.sgd(*model);
       for (int step = 0; step < 3; step++) {
         const auto loss = model->top(model->words(torch::tensor({1, 30, 6 + step})) * model->scale).pow(2).mean();
         run.backward(loss);
         optimizer.step();
         optimizer.zero_grad();
         run.record(loss);
       }
     }},
    {.what = "`nn::quantize` of a module that is not in a `shared_ptr`", .act = [](Run& run) {
       Net net;
       quantise(run, net);
       run.shard_nested(net);
       train(run, net);
     }},
    // --- What comes too late, or twice ---
    refused("`nn::quantize` again", [](Net& net) { tessera::nn::quantize(net); }, "'first' is quantised to nf4 already"),
    {.what = "`nn::quantize` after `fully_shard`", .act = [](Run& run) {
       const auto net = std::make_shared<Net>();
       run.shard(net);
       tessera::nn::quantize(net);
       train(run, *net);
     }, .refused = "before fully_shard"},
    {.what = "`nn::quantize` after `lora::apply`", .act = [](Run& run) {
       const auto net = std::make_shared<Net>();
       if (by_hand(run)) quantise(run, *net);
       lora::apply(*net, kAdapter);
       if (!by_hand(run)) quantise(run, *net);
       run.shard_nested(net);
       train(run, *net);
     }},
    {.what = "other forms on other ranks", .act = [](Run& run) {
       const auto net = std::make_shared<Net>();
       tessera::nn::quantize(net, {.quantization = run.rank() == 0 ? Quantization::Int8 : Quantization::Nf4});
       run.shard(net);
     }, .refused = "first.weight"},
    {.what = "a layer that is not there, or is no `Linear`", .act = [](Run& run) {
       nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 4, 3)), nn::Linear(4, 4));
       tessera::nn::quantize(model, {.layers = {.target_modules = {"0"}}});
       run.shard(model);
     }, .refused = "no layer is named '0'; layers for which it can be are named: 1"},
    {.what = "weights with NaN", .act = [](Run& run) {
       Net net;
       {
         const torch::NoGradGuard no_grad;
         net.second->weight[2][3] = std::numeric_limits<float>::quiet_NaN();
       }
       quantise(run, net);
     }, .refused = "'second' has values that are NaN or infinite"},
  }};
}

}  // namespace tessera::idioms::quantised
