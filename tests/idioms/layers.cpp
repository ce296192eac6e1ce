// The layers and functions of tessera/nn in sharded models. In the plain run with torch's optimizers they are written out by libtorch's
// operators, so the numbers are also those of a program that knows nothing of them.
#include <cmath>
#include <limits>

#include "idiom.h"
#include "tessera/models/llama.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/linear_cross_entropy.h"
#include "tessera/nn/rms_norm.h"
#include "tessera/nn/rotary.h"
#include "tessera/nn/swiglu.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tessera/shard/full_params.h"

namespace tessera::idioms::layers {
namespace {

namespace nn = torch::nn;

constexpr auto kOrder = "written out, sums have another order";
constexpr double kEps = 1e-5;

bool by_hand(const Run& run) {
  return !run.sharded() && run.setting().optimizer == By::Torch;
}

/// 6 -> 8 -> 3, and a weight for a norm of the 8.
struct Net : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(6, 8));
  tessera::nn::RmsNorm norm = register_module("norm", tessera::nn::RmsNorm(8, kEps));
  nn::Linear head = register_module("head", nn::Linear(8, 3));
  Net() { fill(*this); }
};
using Middle = std::function<at::Tensor(const Run& run, Net& net, const at::Tensor& x)>;

at::Tensor normed(const Run& run, Net& net, const at::Tensor& x) {
  if (!by_hand(run)) return net.norm(x);
  return x * (x.square().mean(-1, true) + kEps).rsqrt() * net.norm->weight;
}

/// Rotary positions over the rows as two texts of two tokens.
at::Tensor turned(const Run& run, Net& net, const at::Tensor& x) {
  const auto table = tessera::nn::rotary_table({.theta = 100}, 8, torch::arange(2).unsqueeze(0));
  const auto heads = x.view({2, 2, 1, 8});
  const auto cos = table.cos.unsqueeze(2), sin = table.sin.unsqueeze(2), a = heads.chunk(2, -1)[0], b = heads.chunk(2, -1)[1];
  const auto by_operators = [&] { return torch::cat({a * cos - b * sin, b * cos + a * sin}, -1).transpose(1, 2); };
  const auto result = by_hand(run) ? by_operators() : tessera::nn::rotary(heads, table);
  return torch::tanh(result.transpose(1, 2).reshape({4, 8})) * net.norm->weight;
}

at::Tensor gated(const Run& run, Net& net, const at::Tensor& x) {
  const auto up = x * net.norm->weight;
  return by_hand(run) ? x * torch::sigmoid(x) * up : tessera::nn::swiglu(x, up);
}

/// Attention of two texts of two tokens, with one head.
at::Tensor attended(const Run& /*run*/, Net& net, const at::Tensor& x) {
  const auto heads = x.view({2, 2, 1, 8}).transpose(1, 2);
  return tessera::nn::grouped_attention(heads, heads, heads, {.causal = true}).reshape({4, 8}) * net.norm->weight;
}

std::shared_ptr<Net> sharded(Run& run) {
  auto net = std::make_shared<Net>();
  run.shard_nested(net);
  return net;
}

at::Tensor forward(const Run& run, Net& net, const Middle& middle, const at::Tensor& x) {
  return net.head(middle(run, net, net.first(x)));
}

at::Tensor slope_of(const at::Tensor& y, const at::Tensor& x) {
  return torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
}

void penalise(Run& run, const Middle& middle) {
  const auto net = sharded(run);
  run.train(*net, [&](int step) {
    const auto x = run.batch({4, 6}, step).requires_grad_(true);
    const auto y = forward(run, *net, middle, x).pow(2).mean();
    return y + slope_of(y, x).pow(2).sum();
  }, run.sgd(*net, 0.01));
}

Idiom penalty(const std::string& what, const Middle& middle) {
  return {.what = what, .act = [middle](Run& run) { penalise(run, middle); }, .within = 1e-5, .because = kOrder};
}

/// A call that is refused.
Idiom refused(const std::string& what, const std::function<at::Tensor(const at::Tensor& heads)>& call, const std::string& says) {
  return {.what = what,
          .act =
              [call](Run& run) {
                const auto net = sharded(run);
                run.record(call(net->first(run.batch({6, 6})).view({2, 3, 1, 8})));
              },
          .refused = says};
}

at::Tensor loss_of_scores(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets) {
  const auto losses = torch::linear(x, weight).log_softmax(1).gather(1, targets.unsqueeze(1));
  return -losses.sum() / std::max<int64_t>(1, x.size(0));
}

models::LlamaConfig small_llama() {
  return {.vocab_size = 11, .hidden_size = 8, .intermediate_size = 10, .num_hidden_layers = 1, .num_attention_heads = 2, .tie_word_embeddings = true, .pad_token_id = 2};
}

}  // namespace

Chapter chapter() {
  return {.title = "Layers of `tessera/nn`", .idioms = {
    // --- Derivatives of derivatives ---
    penalty("a penalty on the gradient of the input through `nn::RmsNorm`, and the same written out", normed),
    penalty("through `nn::rotary`", turned),
    penalty("through `nn::swiglu`", gated),
    {.what = "a loss over nothing but derivatives through all three", .act = [](Run& run) {
       const auto net = sharded(run);
       const Middle all = [](const Run& own, Net& of, const at::Tensor& x) { return gated(own, of, turned(own, of, normed(own, of, x))); };
       run.train(*net, [&](int step) {
         const auto x = run.batch({4, 6}, step).requires_grad_(true);
         const auto force = slope_of(forward(run, *net, all, x).sum(), x);
         return (force - run.batch({4, 6}, step + 10)).pow(2).mean() + 0 * net->head->bias.sum();
       }, run.sgd(*net, 0.01));
     }, .within = 1e-5, .because = kOrder},
    {.what = "a penalty on the gradient of the input through `nn::linear_cross_entropy`", .act = [](Run& run) {
       const auto net = sharded(run);
       const auto x = run.batch({4, 6}).requires_grad_(true);
       const auto y = tessera::nn::linear_cross_entropy(net->first(x), net->head->weight, torch::tensor({0, 2, 1, 0}));
       run.backward(y + slope_of(y, x).pow(2).sum());
     }, .refused = "linear_cross_entropy makes its gradients in forward"},
    {.what = "the same through `nn::grouped_attention`", .act = [](Run& run) { penalise(run, attended); }, .refused = "is not implemented",
     .remark = "libtorch's fused attention has no second derivative"},
    // --- Ranks without rows ---
    {.what = "`nn::linear_cross_entropy` where one rank has no rows", .act = [](Run& run) {
       const auto net = sharded(run);
       run.train(*net, [&](int step) {
         const int64_t rows = run.rank() == 0 ? 4 : 0;
         const auto x = normed(run, *net, net->first(run.batch({4, 6}, step).narrow(0, 0, rows)));
         const auto targets = torch::tensor({0, 2, 1, 0}).narrow(0, 0, rows);
         const auto& weight = net->head->weight;
         const auto loss = by_hand(run) ? loss_of_scores(x, weight, targets) : tessera::nn::linear_cross_entropy(x, weight, targets);
         return loss + 0 * net->head->bias.sum();
       }, run.sgd(*net));
     }, .within = 1e-5, .because = kOrder},
    {.what = "a norm, a gate and rotary embeddings where one rank has no rows", .act = [](Run& run) {
       const auto net = sharded(run);
       run.train(*net, [&](int step) {
         auto h = net->first(run.batch({4, 6}, step).narrow(0, 0, run.rank() == 0 ? 4 : 0));
         h = gated(run, *net, normed(run, *net, h));
         const auto table = tessera::nn::rotary_table({}, 8, torch::arange(2).unsqueeze(0));
         const auto heads = tessera::nn::rotary(h.view({-1, 2, 1, 8}), table).transpose(1, 2).reshape({h.size(0), 8});
         return net->head(heads).pow(2).sum();
       }, run.sgd(*net, 0.01));
     }, .within = 1e-5, .because = kOrder},
    // --- What does not belong together ---
    refused("`nn::rotary` with a table of fewer positions than tokens", [](const at::Tensor& heads) {
      return tessera::nn::rotary(heads, tessera::nn::rotary_table({}, 8, torch::arange(2).unsqueeze(0)));
    }, "does not fit values of [2, 3, 1, 8]"),
    refused("with a table of more pairs than half a head", [](const at::Tensor& heads) {
      return tessera::nn::rotary(heads, tessera::nn::rotary_table({}, 12, torch::arange(3).unsqueeze(0)));
    }, "does not fit values of [2, 3, 1, 8]"),
    refused("`nn::rms_norm` with a weight of another size", [](const at::Tensor& heads) {
      return tessera::nn::rms_norm(heads, torch::ones({12}), kEps);
    }, "a weight of [12] does not fit values of [2, 3, 1, 8]"),
    refused("`nn::grouped_attention` with documents of fewer rows than the batch", [](const at::Tensor& heads) {
      const std::vector<std::vector<int64_t>> documents = {{1, 2}};
      const auto each = heads.transpose(1, 2);
      return tessera::nn::grouped_attention(each, each, each, {.documents = &documents});
    }, "documents of 1 rows for a batch of 2"),
    refused("with a mask beside `causal`", [](const at::Tensor& heads) {
      const auto each = heads.transpose(1, 2);
      return tessera::nn::grouped_attention(each, each, each, {.mask = torch::zeros({1, 1, 3, 3}), .causal = true});
    }, "so causal can't be set with it"),
    // --- As in transformers, and where libtorch is wrong ---
    {.what = "a `models::LlamaForCausalLM` whose padding stands in its texts: from what goes in, its row gets no gradient", .act = [](Run& run) {
       models::LlamaForCausalLM model(small_llama());
       fill(*model);
       run.shard_nested(model);
       const auto tokens = torch::tensor({1, 2, 5, 2, 7, 2}).view({2, 3});
       run.train(*model, [&](int step) {
         const auto own = (tokens + (tokens != 2).to(torch::kLong) * (step + 1)).remainder(11);
         return model->model->embed_tokens(own).pow(2).sum() + model->loss(own, own.roll(-1, 1));
       }, run.sgd(*model));
     }},
    {.what = "`nn::SyncBatchNorm` of one image whose gradient lies channels last", .act = [](Run& run) {
       struct Norm : nn::Module {
         nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 4, 1)));
         tessera::nn::SyncBatchNorm norm{nullptr};
         explicit Norm(const Communicator& world) {
           norm = register_module("norm", tessera::nn::SyncBatchNorm(nn::BatchNormOptions(4), world));
           fill(*this);
         }
       } model(run.world());
       run.shard(model);
       run.train(model, [&](int step) {
         const auto y = model.norm(model.conv(run.batch({1, 3, 3, 4}, step)).contiguous());
         const auto weights = values({1, 4, 3, 4}, step);
         return (y * (by_hand(run) ? weights : weights.contiguous(at::MemoryFormat::ChannelsLast))).sum();
       }, run.sgd(model, 0.01));
     }, .within = 1e-5, .because = kOrder},
  }};
}

}  // namespace tessera::idioms::layers
