// In loops over several loaders, finds the batch to which a loss belongs, and the epoch that ends an accumulation.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tessera/train/run.h"
#include "tests/testing/net.h"
#include "tests/testing/trained.h"

namespace tessera::testing::trainer_loops_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A loader of numbers, whose last batch may have fewer rows, so that ranks have other weights there.
data::Loader rows_loader(const Communicator& world, int64_t size, int64_t global_batch) {
  return data::Loader(data::Sampler({.size = size,
                                     .global_batch = global_batch,
                                     .local_ranks = world.local_ranks(),
                                     .ranks = world.size(),
                                     .tail = data::Tail::Keep}),
                      [](std::span<const int64_t> numbers) {
                        const auto column = at::tensor(numbers, at::TensorOptions(at::kCPU).dtype(at::kLong)).to(at::kFloat).unsqueeze(1);
                        return data::Samples{.inputs = column.div(10).expand({-1, 6}), .targets = {}};
                      },
                      {.workers = 1});
}

at::Tensor loss_of(Net& net, const data::Samples& batch) {
  return net->forward(batch.inputs).pow(2).mean();
}

/// The objects of a test: a loader of three batches in which ranks of the last one have the weights 4/3 and 2/3, and another one whose only
/// batch has 8/7 and 6/7.
struct Scene {
  explicit Scene(const Communicator& world, int passes = 2)
      : trainer(options_for(world, {{"gradient_accumulation_steps", std::to_string(passes)}})),
        loader(rows_loader(world, 11, 4)),
        test(rows_loader(world, 7, 8)),
        long_test(rows_loader(world, 15, 8)) {
    trainer.prepare(net, loader, test, long_test);
    optimizer.emplace(parameters(*net), optim::SgdOptions{.lr = 0.1});
    trainer.prepare(*optimizer);
  }
  void learn(const data::Samples& batch) {
    const auto accumulation = trainer.accumulate();
    trainer.backward(loss_of(net, batch));
    trainer.step();
  }

  Trainer trainer;
  Net net = seeded_net();
  data::Loader loader, test, long_test;
  std::optional<optim::SGD> optimizer;
};

using Aside = std::function<void(Scene& scene)>;

/// Returns the parameters after three epochs with two passes a step, in which `aside` runs between each batch and its backward pass.
std::vector<at::Tensor> trained(const Communicator& world, const Aside& aside) {
  Scene scene(world);
  for (int epoch = 0; epoch < 3; epoch++) {
    for (const auto& batch : scene.loader) {
      aside(scene);
      scene.learn(batch);
    }
  }
  EXPECT_EQ(scene.trainer.steps(), 6);
  return whole_values(*scene.net);
}

void evaluate(Net& net, const data::Samples& batch) {
  const torch::NoGradGuard no_grad;
  net->forward(batch.inputs);
}

const std::pair<const char*, Aside> kAsides[] = {
    {"a plain loop",
     [](Scene& scene) {
       for (const auto& batch : scene.test) evaluate(scene.net, batch);
     }},
    {"a loop that is left",
     [](Scene& scene) {
       for (const auto& batch : scene.test) {
         evaluate(scene.net, batch);
         break;
       }
     }},
    {"a loop that an exception leaves",
     [](Scene& scene) {
       try {
         for (const auto& batch : scene.test) {
           evaluate(scene.net, batch);
           throw std::runtime_error("enough");
         }
       } catch (const std::runtime_error&) {
       }
     }},
    {"a loop by next()",
     [](Scene& scene) {
       while (const auto batch = scene.test.next()) evaluate(scene.net, *batch);
     }},
    {"loops within each other",
     [](Scene& scene) {
       for (const auto& batch : scene.long_test) {
         evaluate(scene.net, batch);
         for (const auto& inner : scene.test) evaluate(scene.net, inner);
         if (scene.long_test.at_end()) break;
       }
     }},
    {"an evaluation",
     [](Scene& scene) {
       for (const auto& batch : scene.trainer.evaluation(scene.net, scene.test)) evaluate(scene.net, batch);
     }},
    {"an evaluation that is left",
     [](Scene& scene) {
       for (const auto& batch : scene.trainer.evaluation(scene.net, scene.long_test)) {
         evaluate(scene.net, batch);
         break;
       }
     }},
    {"an evaluation over what is trained on",
     [](Scene& scene) {
       for (const auto& batch : scene.trainer.evaluation(scene.net, scene.loader)) evaluate(scene.net, batch);
     }},
    {"a batch that another Trainer learns from",
     [](Scene& scene) {
       Scene other(scene.trainer.world(), 1);
       for (const auto& batch : other.test) other.learn(batch);
     }},
};

TEST(TrainerLoops, LearnFromTheBatchOfTheirOwn) {
  with_ranks(2, [](const Communicator& world) {
    const auto expected = trained(world, [](Scene&) {});
    for (const auto& [what, aside] : kAsides) {
      SCOPED_TRACE(what);
      expect_same(trained(world, aside), expected);
    }
  });
}

TEST(TrainerLoops, AreTheSameByNext) {
  with_ranks(2, [](const Communicator& world) {
    const auto expected = trained(world, [](Scene&) {});
    for (const auto& [what, aside] : kAsides) {
      SCOPED_TRACE(what);
      Scene scene(world);
      for (int epoch = 0; epoch < 3; epoch++) {
        while (const auto batch = scene.loader.next()) {
          aside(scene);
          scene.learn(*batch);
        }
      }
      expect_same(whole_values(*scene.net), expected);
    }
  });
}

TEST(TrainerLoops, OfARunReportWithTheWeightsOfItsOwn) {
  with_ranks(2, [](const Communicator& world) {
    const auto expected = trained(world, [](Scene&) {});
    for (const auto& [what, aside] : kAsides) {
      SCOPED_TRACE(what);
      Scene scene(world);
      train::Run run(scene.trainer, scene.loader, {.epochs = 3, .report_every = 1});
      while (run.next_epoch()) {
        for (const auto& batch : run.batches()) {
          aside(scene);
          scene.learn(batch);
          aside(scene);
          EXPECT_EQ(scene.loader.taken().weight, batch.weight);
        }
      }
      expect_same(whole_values(*scene.net), expected);
    }
  });
}

TEST(TrainerLoops, WeightTheLossOfTheInnermostOne) {
  with_ranks(2, [](const Communicator& world) {
    const auto run = [&](bool by_hand) {
      Scene scene(world, 1);
      for (const auto& outer : scene.loader) {
        for (const auto& inner : scene.long_test) {  // an inner loop that learns, too
          const auto loss = loss_of(scene.net, inner);
          by_hand ? scene.trainer.backward(loss * inner.weight, {}) : scene.trainer.backward(loss);
          scene.trainer.step();
        }
        const auto loss = loss_of(scene.net, outer);
        by_hand ? scene.trainer.backward(loss * outer.weight, {}) : scene.trainer.backward(loss);
        scene.trainer.step();
      }
      return whole_values(*scene.net);
    };
    expect_same(run(false), run(true));
  });
}

TEST(TrainerLoops, RefuseALossThatMayBeOfEitherBatch) {
  with_ranks(2, [](const Communicator& world) {
    Scene scene(world, 1);
    const auto message = [&](const at::Tensor& loss) { return message_of<UsageError>([&] { scene.trainer.backward(loss); }); };
    const auto one = *scene.loader.next(), other = *scene.test.next();
    EXPECT_THAT(message(loss_of(scene.net, one)),
                AllOf(HasSubstr("batches of two prepared loaders"), HasSubstr("trainer.backward(loss, batch)")));
    // A batch that is passed is the one of the loss.
    const auto norm = [&](const auto& backward) {
      backward(loss_of(scene.net, one));
      const auto result = scene.trainer.grad_norm().item<double>();
      scene.optimizer->zero_grad();
      return result;
    };
    const auto said = norm([&](const at::Tensor& loss) { scene.trainer.backward(loss, one); });
    EXPECT_EQ(norm([&](const at::Tensor& loss) { scene.trainer.backward(loss, {}); }), said);
    EXPECT_NE(norm([&](const at::Tensor& loss) { scene.trainer.backward(loss, other); }), said);
    // In a loop, a batch may also be taken from another loader.
    bool refused = false;
    for (const auto& batch : scene.loader) {
      if (scene.loader.at_end()) {
        scene.test.seek({});
        scene.test.next();
        refused = !message(loss_of(scene.net, batch)).empty();
      } else {
        scene.long_test.next();
        scene.learn(batch);  // both have the weight 1
        scene.long_test.seek({});
      }
    }
    EXPECT_TRUE(refused);
  });
}

TEST(TrainerLoops, KeepTheWeightOfABatchThatOutlivesThem) {
  with_ranks(2, [](const Communicator& world) {
    const auto gradient = [&](const auto& take, bool by_hand) {
      Scene scene(world, 1);
      const data::Samples batch = take(scene);
      EXPECT_NE(batch.weight, 1);
      by_hand ? scene.trainer.backward(loss_of(scene.net, batch), batch) : scene.trainer.backward(loss_of(scene.net, batch));
      return parameters(*scene.net).front().grad().clone();
    };
    const auto taken = [](Scene& scene) { return *scene.test.begin(); };
    EXPECT_TRUE(at::equal(gradient(taken, false), gradient(taken, true)));
    const auto left = [](Scene& scene) {
      for (auto& batch : scene.loader) {
        if (scene.loader.at_end()) return batch;
      }
      return data::Samples();
    };
    EXPECT_TRUE(at::equal(gradient(left, false), gradient(left, true)));
    const auto skipped = [](Scene& scene) {
      auto batch = *scene.test.next();
      Trainer::skip_first_batches(scene.test, 0);
      return batch;
    };
    EXPECT_TRUE(at::equal(gradient(skipped, false), gradient(skipped, true)));
  });
}

TEST(TrainerLoops, EndAnAccumulationWithTheLoopAlone) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world, {{"gradient_accumulation_steps", "4"}}));
    auto net = seeded_net();
    auto loader = numbers_loader(world, 12), other = numbers_loader(world, 8);  // six batches, and four
    trainer.prepare(net, loader, other);
    std::vector<bool> ends;
    for (int epoch = 0; epoch < 2; epoch++) {
      for ([[maybe_unused]] const auto& batch : loader) {
        if (!other.next()) other.next();  // begins anew where it ends
        const auto accumulation = trainer.accumulate();
        ends.push_back(trainer.sync_gradients());
      }
    }
    EXPECT_THAT(ends, ElementsAre(false, false, false, true, false, true, false, false, false, true, false, true));
    // Outside of loops, the epoch of the loader that was taken from last ends it.
    ends.clear();
    other.seek({.batch = 2});
    while (loader.next()) {
      if (!other.next()) other.next();
      const auto accumulation = trainer.accumulate();
      ends.push_back(trainer.sync_gradients());
    }
    EXPECT_THAT(ends, ElementsAre(false, true, false, false, false, true));
  });
}

}  // namespace
}  // namespace tessera::testing::trainer_loops_test
