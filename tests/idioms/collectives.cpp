// Values that ranks exchange in forward, and statistics over the batches of all ranks.
#include "idiom.h"
#include "tessera/nn/collectives.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tessera/shard/call.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/reduction.h"

namespace tessera::idioms::collectives {
namespace {

namespace tnn = torch::nn;

/// Trains an MLP whose loss exchanges something.
void train_exchanging(Run& run, const std::function<at::Tensor(const at::Tensor& y, Mlp& net)>& loss) {
  Mlp net;
  run.shard_nested(net);
  run.train(net, [&](int step) { return loss(net.forward(run.batch({4, 6}, step)), net); }, run.sgd(net, 0.05));
}

/// Runs an operation on what one forward pass of a sharded model has computed.
void exchange_once(Run& run, const std::function<void(const at::Tensor& y)>& act) {
  Mlp net;
  run.shard_nested(net);
  act(net.forward(run.batch({4, 6})));
}

struct Synced : tnn::Module {
  tnn::Linear first{nullptr}, second{nullptr};
  nn::SyncBatchNorm norm{nullptr};
  Synced(const Communicator& world, const tnn::BatchNormOptions& options) {
    first = register_module("first", tnn::Linear(6, 5));
    norm = register_module("norm", nn::SyncBatchNorm(options, world));
    second = register_module("second", tnn::Linear(5, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
};

struct Plain : tnn::Module {
  tnn::Linear first{nullptr}, second{nullptr};
  tnn::BatchNorm1d norm{nullptr};
  explicit Plain(const tnn::BatchNormOptions& options) {
    first = register_module("first", tnn::Linear(6, 5));
    norm = register_module("norm", tnn::BatchNorm1d(options));
    second = register_module("second", tnn::Linear(5, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
};

/// Trains, and evaluates at the end. Records buffers, too.
template <class Model>
void train_synced(Run& run, const std::shared_ptr<Model>& model, const std::function<int64_t(int rank)>& rows) {
  const auto loss = [&](int step) { return call(model, run.batch({rows(run.rank()), 6}, step)).pow(2).mean(); };
  run.train(*model, loss, run.sgd(*model, 0.05));
  for (const auto& buffer : model->named_buffers()) {
    if (buffer.value().defined()) run.record(buffer.value());
  }
  model->eval();
  const torch::NoGradGuard no_grad;
  run.record(call(model, run.batch({4, 6}, 20)));
}

void train_norm(Run& run, const tnn::BatchNormOptions& options, const std::function<int64_t(int rank)>& rows = [](int) { return 4; }) {
  const auto model = std::make_shared<Synced>(run.world(), options);
  run.shard_nested(model);
  train_synced(run, model, rows);
}

/// With a SyncBatchNorm in the plain run, and a converted BatchNorm in the sharded one.
void train_converted(Run& run, bool segments, const std::function<int64_t(int rank)>& rows = [](int) { return 4; }) {
  const auto train = [&](const auto& model) {
    if (segments) activation::checkpoint_module(model);
    train_synced(run, model, rows);
  };
  if (!run.sharded()) {
    const auto model = std::make_shared<Synced>(run.world(), 5);
    run.shard_nested(model);
    return train(model);
  }
  const auto model = std::make_shared<Plain>(5);
  run.shard_nested(model);
  nn::convert_sync_batchnorm(*model, run.world());
  train(model);
}

}  // namespace

Chapter chapter() {
  return {.title = "Collectives in forward", .idioms = {
    // --- Functions that autograd differentiates ---
    {.what = "a loss of the sum of all ranks' features, `nn::all_reduce`", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) { return nn::all_reduce(y, run.world()).pow(2).mean(); });
     }},
    {.what = "a loss of the mean of all ranks' features", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) { return (y - nn::all_reduce(y, run.world(), Reduce::Mean)).pow(3).sum() + y.pow(2).mean(); });
     }},
    {.what = "a contrastive loss over the features of all ranks, `nn::all_gather`", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) {
         const auto scores = y.mm(nn::all_gather(y, run.world()).t());
         return torch::nll_loss(torch::log_softmax(scores, 1), torch::arange(4) + 4 * run.rank());
       });
     }},
    {.what = "features gathered along their second dimension", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) { return torch::tanh(nn::all_gather(y, run.world(), 1)).pow(2).mean(); });
     }},
    {.what = "the losses of all ranks in one vector, and their softmax", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) { return nn::all_gather(y.pow(2).mean(), run.world()).softmax(0).pow(2).sum(); });
     }},
    {.what = "sums of which each rank keeps a part, `nn::reduce_scatter`", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) {
         return nn::reduce_scatter(torch::cat(std::vector(static_cast<size_t>(run.ranks()), y)), run.world(), Reduce::Mean).pow(2).mean();
       });
     }},
    {.what = "rank 1's features as targets of all, `nn::broadcast`", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) { return (y - nn::broadcast(y, run.world(), 1)).pow(2).mean() + y.pow(2).mean(); });
     }},
    {.what = "`nn::all_reduce` of the module's own parameter", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp& net) {
         return y.pow(2).mean() + nn::all_reduce(net.first->weight, run.world(), Reduce::Mean).pow(2).mean();
       });
     }, .within = 1e-6, .because = "the mean of equal gradients is taken twice"},
    {.what = "`nn::all_gather` inside of a segment that runs again", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) {
         const auto mix = [&](const at::Tensor& features) { return torch::tanh(nn::all_gather(features, run.world())).mm(features.t()); };
         return activation::checkpoint(mix, y).pow(2).mean();
       });
     }},
    {.what = "`nn::all_reduce` of a value computed from a shard", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) { y.sum().backward(); });
       Mlp net;
       run.shard_nested(net);
       nn::all_reduce(run.parameters(net)[0] * 2, run.world());
     }, .refused = "was given a shard"},
    {.what = "`nn::all_reduce` of features for their maximum over ranks", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) { nn::all_reduce(y, run.world(), Reduce::Max); });
     }, .refused = "no gradient for a minimum or maximum"},

    // --- Those of a Communicator, in place ---
    {.what = "`world.all_reduce(y)` of features", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) { run.world().all_reduce(y).wait(); });
     }, .refused = "all_reduce was given a tensor that requires a gradient"},
    {.what = "`world.all_reduce(loss)` before backward", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) { run.world().all_reduce(y.pow(2).mean(), {.op = Reduce::Mean}).wait(); });
     }, .refused = "call tessera::nn::all_reduce(tensor, world)"},
    {.what = "`world.all_reduce(loss.detach())` for the log", .act = [](Run& run) {
       train_exchanging(run, [&](const at::Tensor& y, Mlp&) {
         const auto loss = y.pow(2).mean();
         const auto mean = loss.detach().clone();
         run.world().all_reduce(mean, {.op = Reduce::Mean}).wait();
         run.record(mean);
         return loss;
       });
     }},
    {.what = "`world.broadcast(y)` of features", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) { run.world().broadcast(y).wait(); });
     }, .refused = "broadcast was given a tensor that requires a gradient"},
    {.what = "`world.all_gather` of features", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) {
         const Piece piece{.whole = torch::zeros({4 * run.ranks(), 3}), .own = y};
         run.world().all_gather(std::span(&piece, 1)).wait();
       });
     }, .refused = "all_gather was given a tensor that requires a gradient"},
    {.what = "`world.reduce_scatter` of features", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) {
         const Piece piece{.whole = torch::cat(std::vector(static_cast<size_t>(run.ranks()), y)), .own = torch::zeros({4, 3})};
         run.world().reduce_scatter(std::span(&piece, 1)).wait();
       });
     }, .refused = "reduce_scatter was given a tensor that requires a gradient"},
    {.what = "`world.all_reduce` of features that backward needs, without gradients", .act = [](Run& run) {
       exchange_once(run, [&](const at::Tensor& y) {
         const auto h = torch::tanh(y);
         {
           const torch::NoGradGuard no_grad;
           run.world().all_reduce(h).wait();
         }
         h.sum().backward();
       });
     }, .refused = "modified by an inplace operation"},
    {.what = "`world.all_reduce` of an input that backward needs", .act = [](Run& run) {
       Mlp net;
       run.shard_nested(net);
       const auto x = run.batch({4, 6});
       const auto y = net.forward(x);
       run.world().all_reduce(x).wait();
       y.sum().backward();
     }, .refused = "modified by an inplace operation"},

    {.what = "`average_gradients` on rank 0 alone", .act = [](Run& run) {
       Mlp net;
       run.shard(net.first);
       net.forward(run.batch({4, 6})).sum().backward();
       if (run.rank() == 0) average_gradients(net.second->parameters(), run.world());
       run.world().barrier();
     }, .refused = "rank 0 called tessera::average_gradients"},

    // --- Statistics over the batches of all ranks ---
    {.what = "`nn::SyncBatchNorm`", .act = [](Run& run) { train_norm(run, 5); }},
    {.what = "the same with batches of different sizes", .act = [](Run& run) {
       train_norm(run, 5, [](int rank) { return 1 + 2 * rank; });
     }},
    {.what = "the same with a rank that has no samples, whose loss is a sum of nothing", .act = [](Run& run) {
       const auto model = std::make_shared<Synced>(run.world(), 5);
       run.shard(model);
       const auto loss = [&](int step) { return model->forward(run.batch({run.rank() == 1 ? 0 : 4, 6}, step)).pow(2).sum(); };
       run.train(*model, loss, run.sgd(*model, 0.01));
     }},
    {.what = "the same without a momentum: the mean over all batches", .act = [](Run& run) {
       train_norm(run, tnn::BatchNormOptions(5).momentum(std::nullopt));
     }},
    {.what = "the same without running statistics, which evaluation computes as well", .act = [](Run& run) {
       train_norm(run, tnn::BatchNormOptions(5).track_running_stats(false));
     }},
    {.what = "the same without parameters", .act = [](Run& run) { train_norm(run, tnn::BatchNormOptions(5).affine(false)); }},
    {.what = "the same in a segment that runs again", .act = [](Run& run) {
       const auto model = std::make_shared<Synced>(run.world(), 5);
       run.shard_nested(model);
       activation::checkpoint_module(model);
       train_synced(run, model, [](int) { return 4; });
     }, .remark = "running statistics change once"},
    {.what = "`nn::convert_sync_batchnorm` of a model with `BatchNorm1d`, beside one that declares `nn::SyncBatchNorm`", .act = [](Run& run) {
       train_converted(run, /*segments=*/false);
     }},
    {.what = "a converted batch norm with batches of different sizes", .act = [](Run& run) {
       train_converted(run, /*segments=*/false, [](int rank) { return 2 + rank; });
     }},
    {.what = "a converted batch norm in a segment that runs again", .act = [](Run& run) { train_converted(run, /*segments=*/true); }},
    {.what = "`nn::convert_sync_batchnorm` before `fully_shard`", .act = [](Run& run) {
       Plain norm(5);
       nn::convert_sync_batchnorm(norm, run.world());
     }, .refused = "call it after fully_shard"},
    {.what = "`nn::convert_sync_batchnorm` of a norm without parameters", .act = [](Run& run) {
       const auto model = std::make_shared<Plain>(tnn::BatchNormOptions(5).affine(false));
       run.shard(model);
       nn::convert_sync_batchnorm(*model, run.world());
     }, .refused = "recognized by its sharded weight, which is missing in 'norm'"},
  }};
}

}  // namespace tessera::idioms::collectives
