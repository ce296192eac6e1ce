// Less usual uses of the autograd engine with sharded models: partial backward passes, several threads, graphs that outlive their models.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/optim/sgd.h"
#include "tessera/shard/local.h"

#include <thread>

#include "tessera/comm/self/self.h"
#include "tessera/shard/report.h"
#include "tessera/shard/training.h"
#include "tests/testing/blocks.h"
#include "tests/testing/net.h"

namespace tessera::testing::engine_test {
namespace {

namespace nn = torch::nn;
namespace ag = torch::autograd;

// --- Passes of unusual shape ---

TEST(Backward, OfInputsOnlyLeavesNothingWhole) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world);
    const auto x = numbers({5, 8}).set_requires_grad(true);
    Blocks whole;
    const auto expected = ag::grad({whole.forward(x).pow(2).sum()}, {x})[0];
    EXPECT_TRUE(at::allclose(ag::grad({model->forward(x).pow(2).sum()}, {x})[0], expected, 1e-5, 1e-6));
    expect_all_freed(*model);
    for (const auto& shard : parameters(*model)) EXPECT_FALSE(shard.grad().defined());
  });
}

TEST(Backward, OfOneShardReachesOnlyThatOne) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world);
    Blocks whole;
    whole.forward(numbers({5, 8})).pow(2).sum().backward();
    const auto shards = parameters(*model);
    model->forward(numbers({5, 8})).pow(2).sum().backward({}, std::nullopt, false, std::vector<at::Tensor>{shards[2]});
    EXPECT_TRUE(at::allclose(full_grad(shards[2]), whole.parameters()[2].grad(), 1e-5, 1e-6));
    for (size_t i = 0; i < shards.size(); i++) EXPECT_EQ(shards[i].grad().defined(), i == 2) << i;
  });
}

TEST(Backward, RunsInModesOfTheCallersChoice) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world);
    Blocks whole;
    whole.forward(numbers({5, 8})).pow(2).sum().backward();
    {
      const auto loss = model->forward(numbers({5, 8})).pow(2).sum();
      const torch::NoGradGuard no_grad;
      loss.backward();
    }
    expect_same_gradients(*model, whole);
    model->zero_grad();
    {
      const ag::DetectAnomalyGuard anomaly;
      model->forward(numbers({5, 8})).pow(2).sum().backward();
    }
    expect_same_gradients(*model, whole);
    model->zero_grad();
    model->forward(numbers({5, 8}));  // a graph that is dropped
    const auto y = model->forward(numbers({5, 8}));
    y.pow(2).sum().backward({}, /*retain_graph=*/true);
    expect_all_freed(*model);
    y.pow(2).sum().backward();  // a second loss on the same activations
    expect_same_gradients(*model, whole, 2);
  });
}

TEST(Backward, MayStartAtAParameter) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    net->a->weight[1][2].backward();
    auto expected = at::zeros({10, 6});
    expected[1][2] = 1;
    EXPECT_TRUE(at::equal(full_grad(parameters(*net)[0]), expected));
  });
}

TEST(Backward, ThatFailedDoesNotHarmTheNext) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world);
    set_requires_grad(*model->block[1], Training::Frozen);  // so it has no node that would free it
    const auto h = model->block[1]->forward(model->block[0]->forward(numbers({5, 8})));
    bool fails = true;
    h.register_hook([&](const at::Tensor&) {
      if (fails) throw std::runtime_error("in the middle");
    });
    const auto middle = model->block[2]->forward(h);
    const auto loss = model->block[3]->forward(middle).pow(2).sum();
    EXPECT_ANY_THROW(loss.backward({}, /*retain_graph=*/true));
    fails = false;
    model->zero_grad();
    loss.backward();
    Blocks whole;
    whole.forward(numbers({5, 8})).pow(2).sum().backward();
    EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[0]), whole.parameters()[0].grad(), 1e-5, 1e-6));
    expect_all_freed(*model);
  });
}

TEST(Backward, FreesAUnitThatOnlyAHookUses) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world);
    const auto h = model->block[0]->forward(numbers({5, 8}));
    h.register_hook([&](const at::Tensor& gradient) { return gradient + 0 * model->block[3]->a->weight.sum(); });
    model->block[1]->forward(h).sum().backward();
    expect_all_freed(*model);
  });
}

TEST(Units, MayMeetInOneOperator) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world, /*max_live_units=*/1);
    Blocks whole;
    const auto value = [](Blocks& m) {
      const std::vector<at::Tensor> all = {m.block[0]->a->weight, m.block[1]->a->weight, m.block[2]->a->weight, m.block[3]->a->weight};
      return (at::cat(all) * at::cat({all[2], all[0], all[3], all[1]})).sum();
    };
    const auto expected = value(whole), actual = value(*model);
    EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-6));
    expected.backward();
    actual.backward();
    for (const size_t i : {0, 4, 8, 12}) {
      EXPECT_TRUE(at::allclose(full_grad(parameters(*model)[i]), whole.parameters()[i].grad(), 1e-5, 1e-6)) << i;
    }
    expect_all_freed(*model);
  });
}

TEST(Units, UsedInTurnStayWholeWithinTheBound) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = sharded_blocks(world, /*max_live_units=*/2);
    auto x = numbers({2, 8});
    for (int i = 0; i < 16; i++) x = model->block[1]->forward(model->block[0]->forward(x));
    EXPECT_EQ(counters(*model).gathers, 2);
  });
}

// --- Threads ---

void in_threads(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; i++) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
}

TEST(Threads, MayEvaluateOneModelTogether) {
  const auto model = sharded_blocks(self_world(), /*max_live_units=*/1);
  Blocks whole;
  in_threads(4, [&](int thread) {
    const torch::NoGradGuard no_grad;
    const auto x = numbers({5, 8}, thread);
    const auto expected = whole.forward(x);
    for (int pass = 0; pass < 100; pass++) {
      try {
        ASSERT_TRUE(at::equal(model->forward(x), expected)) << "thread " << thread << ", pass " << pass;
      } catch (const std::exception& error) {
        FAIL() << "thread " << thread << ", pass " << pass << ": " << error.what();
      }
    }
  });
}

TEST(Threads, MayTrainModelsOfTheirOwn) {
  const auto trained = [](nn::Module& model, const std::function<at::Tensor(const at::Tensor&)>& forward) {
    torch::optim::SGD optimizer(model.parameters(), 0.01);
    for (int step = 0; step < 20; step++) {
      forward(numbers({5, 8}, step)).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  Blocks whole;
  trained(whole, [&](const at::Tensor& x) { return whole.forward(x); });
  const std::vector<std::shared_ptr<Blocks>> models = {sharded_blocks(self_world()), sharded_blocks(self_world())};
  in_threads(2, [&](int i) {
    auto& model = *models[static_cast<size_t>(i)];
    trained(model, [&](const at::Tensor& x) { return model.forward(x); });
  });
  for (const auto& model : models) {
    for (size_t i = 0; i < 16; i++) {
      EXPECT_TRUE(at::allclose(full_parameter(parameters(*model)[i]), whole.parameters()[i], 1e-5, 1e-6)) << i;
    }
  }
}

// --- Who outlives whom ---

TEST(Lifetime, OfAGraphMayBeLongerThanThatOfItsModel) {
  with_ranks(2, [](const Communicator& world) {
    auto kept = sharded_blocks(world), dropped = sharded_blocks(world);
    kept->forward(numbers({5, 8})).pow(2).sum().backward();
    auto loss = dropped->forward(numbers({5, 8})).pow(2).sum();
    const auto shards = parameters(*dropped);
    const std::weak_ptr<Unit> unit = units(*dropped)[1];
    dropped = nullptr;
    EXPECT_FALSE(unit.expired());
    loss.backward();
    const auto expected = parameters(*kept);
    for (size_t i = 0; i < shards.size(); i++) EXPECT_TRUE(at::equal(to_local(shards[i].grad()), to_local(expected[i].grad()))) << i;
    loss = at::Tensor();
    EXPECT_TRUE(unit.expired());
  });
}

template <class Optimizer, class Options>
void step_after_the_model(const Communicator& world, const Options& options) {
  auto model = sharded_blocks(world);
  Optimizer optimizer(model->parameters(), options);
  model->forward(numbers({5, 8})).pow(2).sum().backward();
  const auto shard = parameters(*model)[0];
  const auto expected = to_local(shard) - to_local(shard.grad());
  model = nullptr;
  optimizer.step();
  EXPECT_TRUE(at::equal(to_local(shard), expected));
  optimizer.zero_grad();
}

TEST(Lifetime, OfAnOptimizerMayBeLongerThanThatOfItsModel) {
  with_ranks(2, [](const Communicator& world) {
    step_after_the_model<torch::optim::SGD>(world, torch::optim::SGDOptions(1));
    step_after_the_model<optim::SGD>(world, optim::SgdOptions{.lr = 1});
  });
}

}  // namespace
}  // namespace tessera::testing::engine_test
