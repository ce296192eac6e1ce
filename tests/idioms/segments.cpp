// Parts of a model that run a second time in backward, and what modules keep from one call to the next. The plain run has no segments.
#include <deque>
#include <thread>

#include "idiom.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/checkpoint_modules.h"

namespace tessera::idioms::segments {
namespace {

namespace nn = torch::nn;

const std::string kOther = "that is not the one which it read in forward, or has other values now";
const std::string kDifference = "did something else when it ran again in backward";

/// run(inputs...), in a segment if the model is sharded.
template <class F, class... Inputs>
auto segment(Run& run, const F& f, const Inputs&... inputs) {
  return run.sharded() ? activation::checkpoint(f, inputs...) : f(inputs...);
}

/// The program's part of the segment, and what is recorded at the end.
template <class State>
struct Part {
  std::function<at::Tensor(State& state, const at::Tensor& h)> forward;
  std::function<at::Tensor(State& state, const at::Tensor& h)> evaluation = {};
};

/// Trains an Mlp whose second layer runs in a segment, with a part of the program's own before it.
template <class State>
void train_part(Run& run, const Part<State>& part) {
  State state;
  Mlp net;
  run.shard_nested(net);
  const auto body = [&](const at::Tensor& h) { return torch::tanh(net.second(part.forward(state, h))); };
  const auto loss = [&](int step) { return segment(run, body, torch::tanh(net.first(run.batch({4, 6}, step)))).pow(2).mean(); };
  run.train(net, loss, run.adamw(net));
  if (part.evaluation) run.record(part.evaluation(state, run.batch({4, 5}, 7)));
}

template <class State>
Idiom part(const std::string& what, std::function<at::Tensor(State& state, const at::Tensor& h)> forward,
           std::function<at::Tensor(State& state, const at::Tensor& h)> evaluation = {}, const std::string& remark = {}) {
  return {.what = what,
          .act = [=](Run& run) { train_part<State>(run, {.forward = forward, .evaluation = evaluation}); },
          .remark = remark};
}

template <class State>
Idiom refused_part(const std::string& what, const std::string& error, std::function<at::Tensor(State& state, const at::Tensor& h)> forward,
                   const std::string& remark = {}) {
  return {.what = what,
          .act = [=](Run& run) { train_part<State>(run, {.forward = forward}); },
          .refused = error,
          .remark = remark};
}

struct Nothing {};
struct Mean {
  at::Tensor value = torch::zeros({5});
};
struct Count {
  int calls = 0;
};
struct Queue {
  std::deque<at::Tensor> features = {torch::full({5}, 0.5), torch::full({5}, 0.25)};
  at::Tensor stacked() const { return torch::stack(std::vector<at::Tensor>(features.begin(), features.end())); }
};
struct Ring {
  at::Tensor features = torch::zeros({6, 5}), position = torch::zeros({1}, torch::kLong);
};
struct Kept {
  at::Tensor tensor = {};
  int calls = 0;
};

/// A module that is called through tessera::call, and is a segment there.
struct Block : nn::Module {
  nn::Linear inner = register_module("inner", nn::Linear(5, 5));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(5));
  at::Tensor mean = register_buffer("mean", torch::zeros({5}));
  at::Tensor calls = register_buffer("calls", torch::zeros({1}));
  std::function<void(Block& self, const at::Tensor& x)> keep;
  at::Tensor forward(const at::Tensor& x) {
    const auto y = inner(norm(x) - mean);
    if (keep) keep(*this, x.detach());
    return torch::tanh(y);
  }
};

struct WithBlock : Mlp {
  std::shared_ptr<Block> block = register_module("block", std::make_shared<Block>());
  WithBlock() { fill(*this); }
  at::Tensor forward(const at::Tensor& x) { return second(call(block, torch::tanh(first(x)))); }
};

Idiom block(const std::string& what, std::function<void(Block& self, const at::Tensor& x)> keep, const std::string& refused = {},
            const std::string& remark = {}) {
  return {.what = what,
          .act =
              [keep](Run& run) {
                const auto model = std::make_shared<WithBlock>();
                model->block->keep = keep;
                run.shard_nested(*model);
                if (run.sharded()) activation::checkpoint_module(model->block);
                run.train(*model, [&](int step) { return loss_of(run, *model, step); }, run.adamw(*model));
                for (const auto& buffer : model->buffers()) run.record(buffer);
                model->eval();
                model->block->keep = {};
                const torch::NoGradGuard no_grad;
                run.record(model->forward(run.batch({4, 6}, 9)));
              },
          .refused = refused,
          .remark = remark};
}

}  // namespace

Chapter chapter() {
  return {
      .title = "Segments that run again in backward",
      .idioms = {
          // --- State that is changed in place, or not at all ---
          block("a checkpointed module with batch norm: its running statistics, and evaluation with them", {}),
          block("a buffer that an operator changes in place in a checkpointed module, `mean.mul_(0.9).add_(x.mean(0) * 0.1)`",
                [](Block& self, const at::Tensor& x) { self.mean.mul_(0.9).add_(x.mean(0) * 0.1); }),
          block("a buffer that counts calls in place, `calls.add_(1)`", [](Block& self, const at::Tensor& /*x*/) { self.calls.add_(1); }),
          block("a buffer that counts calls through `data_ptr`, unless `activation::is_recompute()`",
                [](Block& self, const at::Tensor& /*x*/) {
                  if (!activation::is_recompute()) self.calls.data_ptr<float>()[0]++;
                }),
          part<Mean>("a running mean in a segment, changed in place and subtracted",
                     [](Mean& mean, const at::Tensor& h) {
                       mean.value.lerp_(h.detach().mean(0), 0.25);
                       return h - mean.value;
                     },
                     [](Mean& mean, const at::Tensor& h) { return h - mean.value; }),
          part<Ring>("a queue of features in one tensor, whose position is a tensor, too",
                     [](Ring& ring, const at::Tensor& h) {
                       ring.features.index_copy_(0, ring.position, h.detach().mean(0, true));
                       ring.position.add_(1).remainder_(6);
                       return h * ring.features.abs().mean();
                     },
                     [](Ring& ring, const at::Tensor& h) { return h * ring.features.mean(); }),
          part<Kept>("constants that the first call makes and keeps: a mask, tables of angles",
                     [](Kept& kept, const at::Tensor& h) {
                       if (!kept.tensor.defined()) kept.tensor = torch::arange(4, torch::kFloat).outer(values({5})).cos();
                       return (h * kept.tensor).exp() * kept.tensor;
                     }),
          part<Kept>("what a layer has computed, in a member to look at later",
                     [](Kept& kept, const at::Tensor& h) {
                       kept.tensor = torch::softmax(h, -1).detach();
                       return h * kept.tensor;
                     },
                     [](Kept& kept, const at::Tensor& /*h*/) { return kept.tensor; }),
          part<Count>("a factor that depends on the number of calls, counted unless `activation::is_recompute()`",
                      [](Count& count, const at::Tensor& h) {
                        if (!activation::is_recompute()) count.calls++;
                        return h * (1 + 0.1 * count.calls);
                      },
                      [](Count& count, const at::Tensor& h) { return h * count.calls; }),
          part<Kept>("a scale from the inputs that is found anew at every second call, unless `activation::is_recompute()`",
                     [](Kept& kept, const at::Tensor& h) {
                       if (!activation::is_recompute() && kept.calls++ % 2 == 0) kept.tensor = h.detach().abs().max();
                       return (h / kept.tensor).exp();
                     },
                     [](Kept& kept, const at::Tensor& h) { return h / kept.tensor; }),
          part<Nothing>("tensors made of the program's own numbers: `torch::tensor`, `from_blob`, `torch::full`",
                        [](Nothing&, const at::Tensor& h) {
                          std::vector<float> numbers = {1, 2, 3, 4, 5};
                          const auto sum = h * torch::tensor({1.0F, 2.0F, 3.0F, 4.0F, 5.0F}) + torch::from_blob(numbers.data(), {5});
                          return sum.exp() * torch::full({5}, 0.1);
                        }),
          part<Nothing>("a gradient with respect to an activation inside of a segment",
                        [](Nothing&, const at::Tensor& h) {
                          const auto energy = h.sin().pow(2).sum();
                          return h + torch::autograd::grad({energy}, {h}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
                        }),
          {.what = "a segment on disk whose input is moved in, with in-place operators on its own tensors",
           .act =
               [](Run& run) {
                 Mlp net;
                 run.shard_nested(net);
                 const auto body = [&](const at::Tensor& h) {
                   auto y = torch::tanh(net.second(h));
                   for (int i = 0; i < 10; i++) {
                     std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     y = (y * 1).add_(0.1).relu_();
                   }
                   return y;
                 };
                 const activation::Options on_disk{.offload = OffloadTo::Disk};
                 const auto loss = [&](int step) {
                   auto h = torch::tanh(net.first(run.batch({4, 6}, step))) * 1;
                   return (run.sharded() ? activation::checkpoint(on_disk, body, std::move(h)) : body(h)).pow(2).mean();
                 };
                 run.train(net, loss, run.adamw(net), 2);
               }},
          {.what = "attention with a padding mask in segments within segments",
           .act =
               [](Run& run) {
                 nn::MultiheadAttention attention(6, 2);
                 fill(*attention);
                 run.shard(attention);
                 const auto padding = torch::tensor({{false, false, false, true}, {false, false, true, true}});
                 const auto layer = [&](const at::Tensor& x, const at::Tensor& mask) { return x + std::get<0>(attention(x, x, x, mask)); };
                 const auto both = [&](const at::Tensor& x, const at::Tensor& mask) {
                   return segment(run, layer, segment(run, layer, x, mask), mask);
                 };
                 run.train(*attention, [&](int step) { return segment(run, both, run.batch({4, 2, 6}, step), padding).pow(2).mean(); },
                           run.sgd(*attention));
               }},
          // --- State that changes twice ---
          refused_part<Mean>("a running mean that is assigned, `mean = 0.9 * mean + 0.1 * x.mean(0)`, and subtracted", kOther,
                             [](Mean& mean, const at::Tensor& h) {
                               mean.value = mean.value * 0.9 + h.detach().mean(0) * 0.1;
                               return h - mean.value;
                             },
                             "`mean.mul_(0.9).add_(...)` works"),
          refused_part<Mean>("a running mean that is assigned, for evaluation only", kOther,
                             [](Mean& mean, const at::Tensor& h) {
                               mean.value = mean.value * 0.9 + h.detach().mean(0) * 0.1;
                               return h * 1.5;
                             }),
          refused_part<Mean>("a temperature that each call makes smaller, by assignment", kOther,
                             [](Mean& mean, const at::Tensor& h) {
                               mean.value = (mean.value + 1) * 0.9;
                               return h / mean.value;
                             }),
          refused_part<Mean>("a sum of losses in a member, `sum = sum + loss`", kOther,
                             [](Mean& mean, const at::Tensor& h) {
                               mean.value = mean.value + h.pow(2).mean().detach();
                               return h * 1.5;
                             },
                             "return it, or add it in place"),
          refused_part<Mean>("a mean whose memory is written through `data_ptr`, and which an operator reads", kOther,
                             [](Mean& mean, const at::Tensor& h) {
                               mean.value.data_ptr<float>()[2] += 0.5F;
                               return h - mean.value;
                             }),
          refused_part<Queue>("two members that each call swaps", kOther,
                             [](Queue& queue, const at::Tensor& h) {
                               std::swap(queue.features[0], queue.features[1]);
                               return h * queue.features[0];
                             }),
          refused_part<Queue>("a `std::deque` of the last features", "aten::stack reads",
                             [](Queue& queue, const at::Tensor& h) {
                               queue.features.push_back(h.detach().mean(0));
                               queue.features.pop_front();
                               return h * queue.stacked().abs().mean();
                             }),
          refused_part<Queue>("a history of features that grows", "aten::stack with other arguments",
                             [](Queue& queue, const at::Tensor& h) {
                               queue.features.push_back(h.detach().mean(0));
                               return h * queue.stacked().abs().mean();
                             }),
          refused_part<Count>("a factor that depends on the number of calls", "aten::mul with other arguments",
                              [](Count& count, const at::Tensor& h) { return h * (1 + 0.1 * ++count.calls); },
                              "`if (!activation::is_recompute()) calls++` works"),
          refused_part<Count>("another branch at every second call", kDifference,
                              [](Count& count, const at::Tensor& h) { return ++count.calls % 2 == 1 ? h.exp() : h.sin(); }),
          refused_part<Kept>("a scale from the inputs that is found anew at every second call", "aten::div in place of aten::detach",
                             [](Kept& kept, const at::Tensor& h) {
                               if (kept.calls++ % 2 == 0) kept.tensor = h.detach().abs().max();
                               return (h / kept.tensor).exp();
                             }),
          refused_part<Kept>("values that the first batch initialises, in the first call", kDifference,
                             [](Kept& kept, const at::Tensor& h) {
                               if (kept.calls++ == 0) kept.tensor = torch::ones({5}).copy_(h.detach().abs().mean(0));
                               return h / kept.tensor;
                             }),
          refused_part<Kept>("a mean that the first call makes, and all change in place", "make it before the segment",
                             [](Kept& kept, const at::Tensor& h) {
                               if (!kept.tensor.defined()) kept.tensor = torch::zeros({5});
                               kept.tensor.lerp_(h.detach().mean(0), 0.25);
                               return h - kept.tensor;
                             }),
          refused_part<Kept>("noise that the first call draws and keeps", "in place of aten::rand",
                             [](Kept& kept, const at::Tensor& h) {
                               if (!kept.tensor.defined()) kept.tensor = torch::rand({5});
                               return h * kept.tensor;
                             },
                             "the random numbers of the second run would be others"),
          {.what = "`x = checkpoint([&] { return f(x); })`: what is captured was assigned before backward",
           .act =
               [](Run& run) {
                 Mlp net;
                 run.shard_nested(net);
                 auto h = torch::tanh(net.first(run.batch({4, 6})));
                 h = activation::checkpoint([&] { return torch::tanh(net.second(h.sin())); });
                 run.backward(h.sum());
               },
           .refused = kDifference},
          {.what = "a tensor that segments read, assigned anew by the program before backward",
           .act =
               [](Run& run) {
                 Mlp net;
                 run.shard_nested(net);
                 auto scale = torch::full({5}, 0.5);
                 const auto body = [&](const at::Tensor& h) { return net.second(h * scale); };
                 const auto loss = activation::checkpoint(body, torch::tanh(net.first(run.batch({4, 6})))).sum();
                 scale = scale * 0.5;
                 run.backward(loss);
               },
           .refused = kOther},
          block("a registered buffer that counts calls through `data_ptr`, for nobody in the module",
                [](Block& self, const at::Tensor& /*x*/) { self.calls.data_ptr<float>()[0]++; }, "has changed the buffer 'calls' of"),
          block("a registered buffer that gets other memory in each call, by `set_data`",
                [](Block& self, const at::Tensor& x) { self.mean.set_data(self.mean * 0.9 + x.mean(0) * 0.1); }, kDifference),
          block("a registered buffer that is assigned in each call",
                [](Block& self, const at::Tensor& x) { self.mean = self.mean * 0.9 + x.mean(0) * 0.1; }, kOther),
      }};
}

}  // namespace tessera::idioms::segments
