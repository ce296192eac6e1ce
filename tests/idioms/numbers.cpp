// Numbers that change in each step, and operators at the edges of their arguments.
#include "idiom.h"

namespace tessera::idioms::numbers {
namespace {

namespace nn = torch::nn;

at::Tensor words_of(const Run& run, at::IntArrayRef sizes, int step, int64_t count) {
  return (run.batch(sizes, step) * 1000).abs().to(at::kLong).remainder(count);
}

/// Attention of one head over a cache of positions.
struct Cached : nn::Module {
  nn::Linear queries{nullptr}, keys{nullptr}, out{nullptr};
  Cached() {
    queries = register_module("queries", nn::Linear(6, 4));
    keys = register_module("keys", nn::Linear(6, 4));
    out = register_module("out", nn::Linear(4, 2));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x, at::Tensor& cache, int64_t position) {
    cache = cache.detach().clone();
    cache.narrow(1, position, 1).copy_(keys(x).unsqueeze(1));
    const auto seen = torch::arange(cache.size(1), torch::TensorOptions(at::kLong).device(x.device())) <= position;
    const auto scores = cache.matmul(queries(x).unsqueeze(2)).squeeze(2).masked_fill(seen.logical_not(), -1e9);
    return out(cache.mul(scores.softmax(1).unsqueeze(2)).sum(1));
  }
};

}  // namespace

Chapter chapter() {
  return {.title = "Numbers that change", .idioms = {
      {.what = "a sum of losses divided by the step's number of tokens, a whole number", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 6}, step)).pow(2).sum() / (10 + step); }, run.sgd(*model));
       }},
      {.what = "a loss times the number of the step, and a tensor of one whole number", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) {
          const auto loss = model->forward(run.batch({4, 6}, step)).pow(2).mean() * (step + 1);
          return loss / torch::tensor(int64_t{step} + 2);
        }, run.sgd(*model));
       }},
      {.what = "a window of the features that moves on in each step", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) { return model->forward(run.batch({4, 12}).narrow(1, step, 6)).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "one row of a batch after the other", .act = [](Run& run) {
        const auto model = nested(run);
        const auto all = run.batch({5, 6});
        run.train(*model, [&](int step) { return model->forward(all[step]).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "keys written into a cache, one position a step, and a mask of the positions until now", .act = [](Run& run) {
        const auto model = std::make_shared<Cached>();
        run.shard(model);
        auto cache = run.batch({3, 6, 4}) * 0;
        run.train(*model, [&](int step) { return model->forward(run.batch({3, 6}, step), cache, step).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "`layer_norm` with an epsilon that falls from step to step", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) {
          return torch::layer_norm(model->forward(run.batch({4, 6}, step)), {3}, {}, {}, 0.1 / (step + 1)).pow(3).mean();
        }, run.sgd(*model));
       }},
      {.what = "`lerp` between two outputs, by a weight that goes from 0 to 1", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) {
          const auto x = run.batch({4, 6}, step);
          return model->forward(x).lerp(model->forward(x * 2), step / 3.0).pow(2).mean();
        }, run.sgd(*model));
       }},
      {.what = "`Embedding` with `scale_grad_by_freq`", .act = [](Run& run) {
        nn::Sequential model(nn::Embedding(nn::EmbeddingOptions(7, 5).scale_grad_by_freq(true).padding_idx(3)), nn::Linear(5, 3));
        fill(*model);
        run.shard(*model);
        run.train(*model, [&](int step) { return model->forward(words_of(run, {4, 3}, step, 7)).pow(2).mean(); }, run.sgd(*model));
       }},
      {.what = "`resize_` of a result to fewer elements and back", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) {
          const auto scale = run.batch({3}, step);
          scale.resize_({1});
          scale.mul_(2);
          scale.resize_({3});
          return (model->forward(run.batch({4, 6}, step)) * scale).pow(2).mean();
        }, run.sgd(*model));
       }},
      {.what = "`fill_` of a mask through a tensor that is expanded", .act = [](Run& run) {
        const auto model = nested(run);
        run.train(*model, [&](int step) {
          const auto mask = run.batch({4, 3}, step);
          mask.narrow(1, step % 3, 1).expand({4, 2}).fill_(0.5);
          return (model->forward(run.batch({4, 6}, step)) * mask).pow(2).mean();
        }, run.sgd(*model));
       }},
      }};
}

}  // namespace tessera::idioms::numbers
