// Activation checkpointing of plain modules: every result, gradient and buffer equals that of a plain call to the bit.
#include "tessera/shard/activation.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <atomic>

#include "tessera/base/error.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tests/testing/allocations.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/numbers.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::activation_test {
namespace {

namespace nn = torch::nn;
using activation::checkpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Counts the calls of an operator in this thread, as long as it exists.
class Calls {
 public:
  explicit Calls(const char* op) {
    name = op;
    count = 0;
    handle_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
                                     if (name != nullptr && std::string_view(call.name()) == name) count++;
                                     return nullptr;
                                   }).scopes({at::RecordScope::FUNCTION}));
  }
  ~Calls() { at::removeCallback(handle_); }
  static int seen() { return count; }

 private:
  at::CallbackHandle handle_;
  // Shared by all threads, because a device's backward pass runs in a thread of its own.
  inline static const char* name = nullptr;
  inline static std::atomic<int> count = 0;
};

/// A model, and a part of it as a function of one tensor.
struct Part {
  std::string name;
  std::function<std::shared_ptr<nn::Module>()> make;
  std::function<at::Tensor(nn::Module& module, at::Tensor x)> run;
  friend std::ostream& operator<<(std::ostream& out, const Part& self) { return out << self.name; }
};

template <class M>
Part part(std::string name, std::function<M()> make, std::function<at::Tensor(typename M::ContainedType& module, at::Tensor x)> run = {}) {
  return {.name = std::move(name),
          .make = [=]() -> std::shared_ptr<nn::Module> { return make().ptr(); },
          .run =
              [=](nn::Module& module, at::Tensor x) {
                auto& typed = dynamic_cast<typename M::ContainedType&>(module);
                if constexpr (requires { at::Tensor(typed.forward(x)); }) {
                  if (!run) return at::Tensor(typed.forward(x));
                }
                return run(typed, x);
              }};
}

std::vector<Part> parts() {
  const auto sequence = [](auto... modules) { return [=] { return nn::Sequential(modules()...); }; };
  const auto linear = [] { return nn::Linear(8, 8); };
  return {
      part<nn::Sequential>("Linear", sequence(
                                         linear, [] { return nn::ReLU(); }, linear, [] { return nn::GELU(); }, linear)),
      part<nn::Sequential>("InPlace",
                           sequence(
                               linear, [] { return nn::ReLU(nn::ReLUOptions(true)); }, linear, [] { return nn::Tanh(); }, linear),
                           [](nn::SequentialImpl& s, at::Tensor x) { return s.forward(x).mul_(2).tanh_(); }),
      part<nn::Sequential>("Dropout", sequence(
                                          linear, [] { return nn::Dropout(0.4); }, linear, [] { return nn::Dropout(0.2); })),
      part<nn::Sequential>("BatchNorm", sequence(
                                            linear, [] { return nn::BatchNorm1d(8); }, [] { return nn::ReLU(); }, linear)),
      part<nn::Sequential>("InstanceNorm",
                           sequence([] { return nn::InstanceNorm1d(nn::InstanceNorm1dOptions(8).affine(true).track_running_stats(true)); }),
                           [](nn::SequentialImpl& s, at::Tensor x) { return s.forward(x.view({4, 8, 2}) * 2).reshape({8, 8}); }),
      part<nn::LSTM>(
          // On a GPU, its dropout draws other numbers than in a plain call, because cuDNN starts a new state when a generator is restored.
          "LSTM", [] { return nn::LSTM(nn::LSTMOptions(8, 8).num_layers(2).dropout(on_cpu() ? 0.3 : 0)); },
          [](nn::LSTMImpl& m, at::Tensor x) { return std::get<0>(m.forward(x.view({4, 2, 8}))); }),
      part<nn::MultiheadAttention>(
          "Attention", [] { return nn::MultiheadAttention(8, 2); },
          [](nn::MultiheadAttentionImpl& m, at::Tensor x) {
            x = x.view({4, 2, 8});
            return std::get<0>(m.forward(x, x, x));
          }),
      part<nn::Conv2d>(
          "Conv", [] { return nn::Conv2d(2, 3, 3); }, [](nn::Conv2dImpl& m, at::Tensor x) { return m.forward(x.view({2, 2, 4, 4})); }),
      part<nn::Linear>(
          "Attended", [] { return nn::Linear(8, 8); },
          [](nn::LinearImpl& m, at::Tensor x) {
            const auto q = m.forward(x).view({1, 2, 4, 8});
            return at::scaled_dot_product_attention(q, q * 2, q + 1, {}, 0, true).log_softmax(-1);
          }),
  };
}

struct Outcome {
  std::vector<at::Tensor> tensors;
};

using Around = std::function<at::Tensor(const std::function<at::Tensor(at::Tensor)>& run, const at::Tensor& x)>;

/// Three steps of training: outputs, gradients and buffers.
std::vector<at::Tensor> train(const Part& part, bool needs, const Around& around) {
  torch::manual_seed(3);
  const auto module = part.make();
  const auto before = numbers({16, 8}).view({-1}).slice(0, 0, 64).view({8, 8}).clone().set_requires_grad(needs);
  torch::optim::SGD optimizer(module->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 3; step++) {
    optimizer.zero_grad();
    const auto y = around([&part, module](const at::Tensor& x) { return part.run(*module, x); }, before * 1.5);
    seen.push_back(y.detach().clone());
    (y * numbers(y.sizes(), step)).sum().backward();
    for (const auto& parameter : module->parameters()) seen.push_back(parameter.grad().clone());
    for (const auto& buffer : module->buffers()) seen.push_back(buffer.clone());
    seen.push_back(at::rand({2}));  // the state of the random generator
    optimizer.step();
  }
  if (needs) seen.push_back(before.grad());
  return seen;
}

class Segments : public ::testing::TestWithParam<Part> {};

TEST_P(Segments, GiveWhatAPlainCallGives) {
  if (!on_cpu() && GetParam().name == "InstanceNorm") GTEST_SKIP() << "its repeat() makes a list of numbers by default, and reads it on the host";
  for (const bool needs : {false, true}) {
    const auto plain = train(GetParam(), needs, [](const auto& run, const at::Tensor& x) { return run(x); });
    expect_same(train(GetParam(), needs, [](const auto& run, const at::Tensor& x) { return checkpoint(run, x); }), plain);
    expect_same(train(GetParam(), needs,
                      [](const auto& run, const at::Tensor& x) {
                        return checkpoint([=](const at::Tensor& outer) { return checkpoint(run, outer * 1).mul(1); }, x);
                      }),
                plain);
    // A rule that keeps everything, one that keeps what is expensive, and one on disk.
    for (const auto& keep :
         {activation::KeepRule([](std::string_view) { return true; }),
          activation::operators({"aten::addmm", "aten::mm", "aten::convolution", "aten::bmm", "aten::lstm"}),
          activation::KeepRule([](std::string_view name) { return name.find("dropout") != name.npos || name == "aten::linear"; })}) {
      for (const auto offload : {OffloadTo::Nowhere, OffloadTo::Disk}) {
        expect_same(train(GetParam(), needs,
                          [&](const auto& run, const at::Tensor& x) {
                            return checkpoint({.keep = keep, .offload = offload, .disk = {.folder = folder_on_disk()}}, run, x);
                          }),
                    plain);
      }
    }
    expect_same(train(GetParam(), needs,
                      [](const auto& run, const at::Tensor& x) {
                        return checkpoint(
                            [=](const at::Tensor& outer) {
                              return checkpoint({.keep = activation::operators({"aten::addmm", "aten::relu"})}, run, outer * 1).mul(1);
                            },
                            x);
                      }),
                plain);
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, Segments, ::testing::ValuesIn(parts()), ::testing::PrintToStringParamName());

at::Tensor twice_as_long(const at::Tensor& x) {
  return at::cat({x, x.exp()});
}

TEST(Checkpoint, TakesAndReturnsWhatFunctionsDo) {
  const auto x = numbers({4}).set_requires_grad(true), y = numbers({4}, 1);
  const auto [sum, rest] = checkpoint(
      [](const std::map<std::string, at::Tensor>& named, double factor, const std::string& which, std::optional<at::Tensor> none) {
        EXPECT_FALSE(none.has_value());
        return std::pair(named.at(which) * factor, std::vector{named.at("y").exp(), named.at("x").sin()});
      },
      std::map<std::string, at::Tensor>{{"x", x}, {"y", y}}, 3.0, std::string("x"), std::optional<at::Tensor>());
  (sum * rest[1] + rest[0]).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), 3 * x.sin() + 3 * x * x.cos()));
  EXPECT_EQ(checkpoint(&twice_as_long, y).size(0), 8);
  at::Tensor out;
  checkpoint([&](const at::Tensor& in) { out = in.exp(); }, x);  // returns nothing
  EXPECT_TRUE(at::equal(out, x.exp()));
}

TEST(Checkpoint, WithoutGradientsIsAPlainCall) {
  const torch::NoGradGuard no_grad;
  int runs = 0;
  const auto y = checkpoint([&](const at::Tensor& x) { return runs++, x * 2; }, numbers({4}).set_requires_grad(true));
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(runs, 1);
}

TEST(Checkpoint, RunsOnceMoreAndNoFurtherThanNeeded) {
  int begun = 0, ended = 0;
  const auto weight = numbers({8, 8}).set_requires_grad(true);
  const auto y = checkpoint(
      [&](const at::Tensor& x) {
        begun++;
        auto z = x.mm(weight).exp().mm(weight);
        ended++;
        return z;
      },
      numbers({2, 8}));
  const Calls calls("aten::exp");
  y.sum().backward();
  EXPECT_EQ(calls.seen(), 1);
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(ended, 1);  // the recomputation stops when the inputs of the last product exist
}

TEST(Checkpoint, CanBeDifferentiatedTwiceAndAsked) {
  const auto w = numbers({3}).set_requires_grad(true), x = numbers({3}, 1).set_requires_grad(true);
  const auto f = [&](const at::Tensor& t) { return (t * w).sin() * t.exp(); };
  const auto second = [&](const at::Tensor& y) {
    const auto first = torch::autograd::grad({y.sum()}, {x, w}, {}, true, true);
    return torch::autograd::grad({first[0].sum() + first[1].pow(2).sum()}, {x, w});
  };
  expect_same(second(checkpoint(f, x)), second(f(x)));
  const auto y = checkpoint(f, x), plain = f(x);
  for (int i = 0; i < 3; i++) {  // the graph is kept for several passes
    expect_same(torch::autograd::grad({y.sum()}, {w}, {}, true), torch::autograd::grad({plain.sum()}, {w}, {}, true));
  }
}

TEST(Checkpoint, MayRunBackwardInside) {
  const auto w = numbers({3}).set_requires_grad(true);
  const auto f = [&](at::Tensor x) {
    const auto energy = (x * w).sin().sum();
    return torch::autograd::grad({energy}, {x}, {}, true, true)[0].exp();
  };
  const auto x = numbers({3}, 1).set_requires_grad(true), y = numbers({3}, 1).set_requires_grad(true);
  checkpoint(f, x * 2).sum().backward();
  const auto ours = w.grad().clone();
  w.mutable_grad().reset();
  f(y * 2).sum().backward();
  expect_same(std::vector{ours, x.grad()}, std::vector{w.grad(), y.grad()});
}

TEST(Checkpoint, NestsDeeply) {
  std::function<at::Tensor(int, const at::Tensor&)> nest = [&](int depth, const at::Tensor& x) {
    return depth == 0 ? x.sin() : checkpoint([&, depth](const at::Tensor& t) { return nest(depth - 1, t); }, x).sin();
  };
  const auto x = numbers({3}).set_requires_grad(true), y = numbers({3}).set_requires_grad(true);
  nest(60, x).sum().backward();
  auto value = y;
  for (int i = 0; i < 61; i++) value = value.sin();
  value.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
}

TEST(Checkpoint, RepeatsChangesOfWhatIsNotItsOwnOnACopy) {
  const auto counter = at::zeros({1}), x = numbers({3}).set_requires_grad(true);
  const auto f = [&](const at::Tensor& t) {
    const auto a = t + counter;  // reads the tensor that the next line changes
    counter.add_(1);
    const auto b = (a + counter).exp();
    counter.mul_(2);
    return (b + counter).exp();
  };
  const auto y = checkpoint(f, x);
  EXPECT_EQ(counter.item<float>(), 2);
  y.sum().backward();
  EXPECT_EQ(counter.item<float>(), 2);
  EXPECT_TRUE(at::allclose(x.grad(), ((x + 1).exp() + 2).exp() * (x + 1).exp()));
}

constexpr int64_t kLayerBytes = 256 * 1024;

at::Tensor layers(at::Tensor x, int count) {
  for (int i = 0; i < count; i++) x = (x * x).sin();
  return x;
}

TEST(Checkpoint, KeepsNoMoreThanTheInputsOfSegments) {
  const auto x = at::ones({kLayerBytes / 4}).set_requires_grad(true);
  const auto peak = [&](const auto& forward) {
    const Allocations allocations;
    forward(x.sin()).sum().backward();
    return allocations.peak() / kLayerBytes;
  };
  const auto segment = [](const at::Tensor& t) { return layers(t, 4); };
  const auto four = [&](const activation::Options& options) {
    return [&segment, options](at::Tensor t) {
      for (int i = 0; i < 4; i++) t = checkpoint(options, segment, t);
      return t;
    };
  };
  const auto plain = peak([&](const at::Tensor& t) { return layers(t, 16); });
  EXPECT_GE(plain, 32);
  EXPECT_LE(peak(four({})), 16);  // 4 inputs, and the activations of one segment
  EXPECT_LE(peak([&](const at::Tensor& t) { return checkpoint([&](const at::Tensor& outer) { return four({})(outer); }, t); }), 16);
  EXPECT_GE(peak(four({.keep = [](std::string_view) { return true; }})), 32);
}

TEST(Checkpoint, ReleasesEverything) {
  const auto x = numbers({3}).set_requires_grad(true);
  const auto owned = std::make_shared<int>();
  {
    const auto y = checkpoint(
        [owned](const at::Tensor& t) { return checkpoint([owned](const at::Tensor& u) { return u.exp().sin(); }, t).exp(); }, x * 2);
    y.sum().backward();
    EXPECT_EQ(owned.use_count(), 1);
    const auto unused =
        checkpoint({.keep = [](std::string_view) { return true; }}, [owned](const at::Tensor& t) { return t.exp().sin(); }, x * 2);
  }
  EXPECT_EQ(owned.use_count(), 1);
}

/// An operator of a program, with a gradient of its own, that counts its runs. The operator squared_twice calls it twice.
struct Squared : torch::autograd::Function<Squared> {
  inline static std::atomic<int> runs = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    runs++;
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    return {2 * context->get_saved_variables()[0] * gradients[0]};
  }
};

at::Tensor squared(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera_test::squared", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}
at::Tensor squared_twice(const at::Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("tessera_test::squared_twice", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}

TORCH_LIBRARY(tessera_test, library) {
  library.def("squared(Tensor x) -> Tensor", [](const at::Tensor& x) { return Squared::apply(x); });
  library.def("squared_twice(Tensor x) -> Tensor", [](const at::Tensor& x) { return squared(squared(x).add_(1)); });
}

TEST(Keep, LeavesOutTheOperatorsThatAreKept) {
  const auto gradient_and_runs = [](const activation::Options& options) {
    const auto x = numbers({4, 8}).set_requires_grad(true);
    Squared::runs = 0;
    checkpoint(options, [](const at::Tensor& t) { return squared_twice(t.exp()).sin().exp(); }, x).sum().backward();
    return std::pair(x.grad(), Squared::runs.load());
  };
  const auto [gradient, runs] = gradient_and_runs({});
  EXPECT_EQ(runs, 4);
  for (const auto* kept : {"tessera_test::squared", "tessera_test::squared_twice"}) {
    const auto [same, fewer] = gradient_and_runs({.keep = activation::operators({kept})});
    EXPECT_TRUE(at::equal(same, gradient));
    EXPECT_EQ(fewer, 2) << kept;
  }
}

TEST(Keep, RefusesOperatorsThatDoNotExist) {
  try {
    activation::operators({"aten::mmm"});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("libtorch has no operator 'aten::mmm' (did you mean 'aten::"));
  }
}

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const UsageError& error) {
    return error.what();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Misuse, IsRefusedByName) {
  const auto w = numbers({3}).set_requires_grad(true);
  const auto f = [&](const at::Tensor& x) { return (x * w).exp(); };
  const auto changing = [&](const at::Tensor& changed, const at::Tensor& x) {
    return error_of([&] {
      const auto y = checkpoint(f, x);
      {
        const torch::NoGradGuard no_grad;
        changed.add_(1);
      }
      y.sum().backward();
    });
  };
  const auto x = numbers({3});
  EXPECT_THAT(changing(x, x), HasSubstr("of shape [3] that a checkpointed segment needs to run again was changed in place"));
  EXPECT_THAT(changing(w, x), HasSubstr("a parameter or another tensor that a checkpointed segment reads was changed in place"));
  EXPECT_THAT(error_of([&] { checkpoint([](at::Tensor t) { return t.relu_(); }, x * w); }),
              HasSubstr("aten::relu_ changes an input of a checkpointed segment in place"));
  for (const bool shorter : {true, false}) {
    int run = 0;
    const auto moody = [&](const at::Tensor& t) {
      if (run++ == 0) return t.exp().sin();
      return shorter ? t * 2 : t.view({3, 1}).exp();
    };
    EXPECT_THAT(error_of([&] { checkpoint(moody, x * w).sum().backward(); }),
                HasSubstr("did something else when it ran again in backward"));
  }
  if (!on_cpu()) return;
  EXPECT_THAT(error_of([&] { checkpoint({.offload = OffloadTo::Host}, f, x); }), HasSubstr("OffloadTo::Disk moves them to disk"));
}

TEST(Modules, AreSegmentsWhereTheyAreCalled) {
  nn::Sequential model(nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 8), nn::Tanh());
  fill_with_numbers(*model);
  const auto x = numbers({4, 8});
  const auto forwards = [&](const auto& forward) {
    model->zero_grad();
    const auto y = forward();
    const Calls calls("aten::tanh");
    y.sum().backward();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
    return std::pair(calls.seen(), gradients);
  };
  const auto [none, plain] = forwards([&] { return model->forward(x); });
  EXPECT_EQ(none, 0);
  const auto expect_reruns = [&](int count, const auto& forward) {
    const auto [seen, gradients] = forwards(forward);
    EXPECT_EQ(seen, count);
    expect_same(gradients, plain);
  };
  expect_reruns(2, [&] { return checkpoint(model, x); });
  expect_reruns(1, [&] { return activation::checkpoint_sequential(model, 2, x); });
  EXPECT_THAT(error_of([&] { activation::checkpoint_sequential(model, 5, x); }), HasSubstr("4 modules can't be divided into 5 segments"));
  activation::checkpoint_module(model);
  expect_reruns(2, [&] { return call(model, x); });
}

}  // namespace
}  // namespace tessera::testing::activation_test
