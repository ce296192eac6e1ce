// A recomputation that runs other operators than forward, or reads other values, is an error; one that computes the same is not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <deque>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/numbers.h"
#include "tests/testing/transports.h"

namespace tessera::testing::operator_sequence_test {
namespace {

namespace nn = torch::nn;
using activation::checkpoint;
using activation::is_recompute;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Function = std::function<at::Tensor(const at::Tensor& x)>;

at::Tensor alone(const Function& run, const at::Tensor& x) {
  return checkpoint(run, x);
}
at::Tensor nested(const Function& run, const at::Tensor& x) {
  return checkpoint([run](const at::Tensor& outer) { return checkpoint(run, outer.sin()).exp(); }, x);
}
at::Tensor keeping(const Function& run, const at::Tensor& x) {
  return checkpoint({.keep = activation::operators({"aten::exp", "aten::mul"})}, run, x);
}

using Around = at::Tensor (*)(const Function& run, const at::Tensor& x);
constexpr Around kWays[] = {&alone, &nested, &keeping};

/// A function that keeps something from one call to the next: its results, gradients and state are those of plain calls.
void expect_equal(const std::function<Function()>& make) {
  for (const auto around : kWays) {
    const auto gradients_of = [&](const Around& way) {
      const auto run = make();
      std::vector<at::Tensor> seen;
      for (int step = 0; step < 3; step++) {
        const auto x = numbers({4, 3}, step).set_requires_grad(true);
        const auto y = way(run, x);
        y.sum().backward();
        seen.insert(seen.end(), {y.detach(), x.grad()});
      }
      return seen;
    };
    const auto plainly = [&]() -> Around {
      if (around == &nested) return [](const Function& run, const at::Tensor& x) { return run(x.sin()).exp(); };
      return [](const Function& run, const at::Tensor& x) { return run(x); };
    }();
    const auto ours = gradients_of(around), expected = gradients_of(plainly);
    for (size_t i = 0; i < expected.size(); i++) EXPECT_TRUE(at::equal(ours[i], expected[i])) << i;
  }
}

void expect_refused(const std::function<Function()>& make, const std::string& part) {
  for (const auto around : kWays) {
    const auto run = make();
    EXPECT_THAT(message_of<UsageError>([&] {
                  for (int step = 0; step < 3; step++) around(run, numbers({4, 3}, step).set_requires_grad(true)).sum().backward();
                }),
                AllOf(HasSubstr(part), HasSubstr("again in backward")));
  }
}

TEST(OperatorSequence, TakesConstantsThatTheProgramKeeps) {
  expect_equal([] {
    return [table = at::Tensor(), frequencies = numbers({3})](const at::Tensor& x) mutable {
      if (!table.defined()) table = at::arange(4, at::kFloat).outer(frequencies).cos();
      return (x * table).exp() * table;
    };
  });
  const auto table = std::make_shared<at::Tensor>();
  expect_equal([&] {
    table->reset();
    return [&](const at::Tensor& x) {
      if (!table->defined()) *table = at::arange(12, at::kFloat).view({4, 3}).cos();
      return (x * *table).exp() * *table;
    };
  });
  expect_equal([] { return [](const at::Tensor& x) { return (x * here(torch::tensor({1.0F, 2.0F, 3.0F}))).exp() * 2; }; });
  expect_equal([] {
    return [](const at::Tensor& x) {
      std::vector<float> values = {1, 2, 3};
      return (x * here(torch::from_blob(values.data(), {3}).clone())).exp();
    };
  });
}

TEST(OperatorSequence, RefusesStateThatIsAssigned) {
  const auto state = std::make_shared<at::Tensor>();
  const auto expect = [&](const Function& run) {
    expect_refused(
        [&] {
          *state = at::zeros({3});
          return run;
        },
        "that is not the one which it read in forward, or has other values now");
  };
  expect([&](const at::Tensor& x) {
    *state = *state * 0.9 + x.detach().mean(0) * 0.1;
    return (x - *state).exp().sin();
  });
  expect([&](const at::Tensor& x) {  // nothing here reads the state
    *state = *state * 0.9 + x.detach().mean(0) * 0.1;
    return x.exp().sin();
  });
  expect([&](const at::Tensor& x) {
    const auto y = (x - *state).exp().sin();
    *state = *state + 1;
    return y;
  });
  expect([&](const at::Tensor& x) {
    const auto y = (x - *state).exp().sin();
    state->data_ptr<float>()[1]++;
    return y;
  });
}

TEST(OperatorSequence, RefusesWhatACounterChanges) {
  expect_refused([] { return [calls = std::make_shared<int>(0)](const at::Tensor& x) { return (x * ++*calls).exp().sin(); }; },
                 "it called aten::mul with other arguments than in forward");
  expect_refused(
      [] { return [calls = std::make_shared<int>(0)](const at::Tensor& x) { return ++*calls % 2 == 1 ? x.exp() : x.cos().exp(); }; },
      "it called aten::");
  const auto every_second = [](bool asks) {
    return [=] {
      return [asks, calls = std::make_shared<int>(0), scale = std::make_shared<at::Tensor>()](const at::Tensor& x) {
        const bool now = asks ? !is_recompute() : ++*calls % 2 == 1;
        if (now) *scale = x.detach().abs().max();
        return (x / *scale).exp();
      };
    };
  };
  expect_refused(every_second(false), "it called aten::div in place of aten::detach");
  expect_equal(every_second(true));
  expect_refused(
      [] {
        return [noise = std::make_shared<at::Tensor>()](const at::Tensor& x) {
          if (!is_recompute()) *noise = at::rand_like(x);
          return (x + *noise).exp().sin();
        };
      },
      "in place of aten::rand_like");
}

TEST(OperatorSequence, TakesKeptOperatorsThatFailOrAreLeftOut) {
  expect_equal([] {
    return [table = std::make_shared<at::Tensor>()](const at::Tensor& x) {
      if (!table->defined()) *table = (at::arange(3, at::kFloat) * 0.1).exp();
      return (x * *table).exp().sin();
    };
  });
  const auto run = [](const at::Tensor& x) {
    try {
      return x.mm(x);
    } catch (const std::exception&) {
      return x.mm(x.t()).sin();
    }
  };
  const auto x = numbers({4, 3}).set_requires_grad(true), y = numbers({4, 3}).set_requires_grad(true);
  checkpoint({.keep = activation::operators({"aten::mm"})}, run, x).sum().backward();
  run(y).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
}

TEST(OperatorSequence, RefusesQueues) {
  expect_refused(
      [] {
        return [queue = std::make_shared<std::deque<at::Tensor>>(2, at::zeros({4, 3}))](const at::Tensor& x) {
          queue->push_back(x.detach());
          queue->pop_front();
          return (x * at::stack(std::vector<at::Tensor>(queue->begin(), queue->end())).mean()).exp();
        };
      },
      "aten::stack reads");
  expect_refused(
      [] {
        return [history = std::make_shared<std::vector<at::Tensor>>()](const at::Tensor& x) {
          history->push_back(x.detach());
          return (x * at::cat(*history).mean()).exp();
        };
      },
      "aten::cat with other arguments");
}

TEST(OperatorSequence, RefusesATensorThatWasAssignedBeforeBackward) {
  auto x = numbers({4, 3}).set_requires_grad(true) * 1;
  x = checkpoint([&] { return x.exp().sin(); });
  EXPECT_THAT(message_of<UsageError>([&] { x.sum().backward(); }), HasSubstr("give it as an input"));
}

struct Counting : nn::Module {
  at::Tensor calls = register_buffer("calls", at::zeros({1}, at::kLong));
  enum class Way { Pointer, InPlace, Guarded } way;
  explicit Counting(Way way) : way(way) {}
  at::Tensor forward(const at::Tensor& x) {
    if (way == Way::Pointer || (way == Way::Guarded && !is_recompute())) calls.data_ptr<int64_t>()[0]++;
    if (way == Way::InPlace) calls.add_(1);
    return x.exp().sin();
  }
};

TEST(OperatorSequence, NamesTheBufferThatIsChangedTwice) {
  const auto train = [](Counting::Way way) {
    const auto module = std::make_shared<Counting>(way);
    for (int i = 0; i < 2; i++) checkpoint(module, numbers({3}).set_requires_grad(true)).sum().backward();
    return module->calls.item<int64_t>();
  };
  EXPECT_THAT(message_of<UsageError>([&] { train(Counting::Way::Pointer); }),
              HasSubstr("has changed the buffer 'calls' of Counting again"));
  EXPECT_EQ(train(Counting::Way::InPlace), 2);
  EXPECT_EQ(train(Counting::Way::Guarded), 2);
  EXPECT_FALSE(is_recompute());
}

TEST(OperatorSequence, TakesWritesToMemoryThatAnInputHasLeft) {
  const activation::Options on_disk{.offload = OffloadTo::Disk, .disk = {.folder = folder_on_disk()}};
  const auto run = [](const at::Tensor& x) {
    auto y = x.sin();
    for (int i = 0; i < 20; i++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // until the input is on disk, and its memory is free
      y = (y * 1).add_(1).relu_();
    }
    return y;
  };
  const auto x = numbers({64}).set_requires_grad(true), y = numbers({64}).set_requires_grad(true);
  checkpoint(on_disk, run, x * 2).sum().backward();
  run(y * 2).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
}

TEST(OperatorSequence, TakesAttentionWithAMaskInNestedSegments) {
  nn::MultiheadAttention attention(8, 2);
  fill_with_numbers(*attention);
  const auto padding = here(torch::tensor({{false, false, false, true}, {false, false, true, true}}));
  const Function layer = [&](const at::Tensor& x) { return x + std::get<0>(attention(x, x, x, padding)); };
  const auto with_mask = [&](const at::Tensor& x, const at::Tensor& mask) { return x + std::get<0>(attention(x, x, x, mask)); };
  const auto gradients = [&](const std::function<at::Tensor(const at::Tensor& x)>& run) {
    attention->zero_grad();
    const auto x = numbers({4, 2, 8}).set_requires_grad(true);
    run(x).pow(2).sum().backward();
    std::vector<at::Tensor> seen = {x.grad()};
    for (const auto& parameter : attention->parameters()) seen.push_back(parameter.grad().clone());
    return seen;
  };
  const auto plain = gradients([&](const at::Tensor& x) { return layer(layer(x)); });
  const auto expect_same = [&](const std::function<at::Tensor(const at::Tensor& x)>& run) {
    const auto ours = gradients(run);
    for (size_t i = 0; i < plain.size(); i++) EXPECT_TRUE(at::equal(ours[i], plain[i])) << i;
  };
  const auto twice = [&](const at::Tensor& t) { return checkpoint(layer, checkpoint(layer, t)); };
  expect_same([&](const at::Tensor& x) { return checkpoint(twice, x); });
  const auto twice_with_mask = [&](const at::Tensor& t, const at::Tensor& mask) {
    return checkpoint(with_mask, checkpoint(with_mask, t, mask), mask);
  };
  expect_same([&](const at::Tensor& x) { return checkpoint(twice_with_mask, x, padding); });
}

}  // namespace
}  // namespace tessera::testing::operator_sequence_test
