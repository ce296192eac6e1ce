// Runs with optimizers of torch::optim resume from a checkpoint with the same bits.
#include "tessera/checkpoint/live/torch_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"
#include "tests/testing/saved_picture.h"

namespace tessera::checkpoint::torch_state_test {
namespace {

using testing::Folder;
using ::testing::HasSubstr;
using testing::message_of;
using Parameters = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Parameters&)>;

template <class Optimizer, class Options>
Make make(Options options) {
  return [options](const Parameters& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

const Make kAmsgrad = make<torch::optim::Adam>(torch::optim::AdamOptions(0.05).amsgrad(true));
const Make kAdam = make<torch::optim::Adam>(torch::optim::AdamOptions(0.05));
const Make kMomentum = make<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));

const std::map<std::string, Make> kOptimizers = {
    {"Adam", kAdam},
    {"Amsgrad", kAmsgrad},
    {"AdamW", make<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05).weight_decay(0.1))},
    {"SGD", make<torch::optim::SGD>(torch::optim::SGDOptions(0.05))},
    {"Momentum", kMomentum},
    {"Adagrad", make<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05).lr_decay(0.1))},
    {"RMSprop", make<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01))},
    {"CenteredRMSprop", make<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5))},
};

/// A Picture with an optimizer of libtorch.
struct TorchRun {
  testing::PictureRun picture;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

  TorchRun(const Communicator& world, const Make& make, double scale = 0.5)
      : picture(world, testing::shard_nested, scale), optimizer(make(picture.trained)) {}

  Contents contents() const { return {.model = picture.model.get(), .optimizer = optimizer.get()}; }
  std::vector<double> train(int first, int last) const {
    std::vector<double> losses;
    for (int step = first; step < last; step++) {
      const auto loss = picture.model->forward(testing::numbers({4, 3, 4, 4}, 100 * step + picture.world.rank())).pow(2).mean();
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }
};

class TorchState : public ::testing::TestWithParam<std::string> {};

TEST_P(TorchState, LetsARunGoOn) {
  const auto& optimizer = kOptimizers.at(GetParam());
  for (const int ranks : {1, 2, 3}) {
    const Folder folder;
    testing::with_ranks(ranks, [&](const Communicator& world) {
      const TorchRun run(world, optimizer);
      run.train(0, 3);
      save(folder / "a", run.contents(), world);
      const auto expected = run.train(3, 6);

      const TorchRun fresh(world, optimizer, 0.25);
      auto into = fresh.contents();
      load(folder / "a", into, world);
      EXPECT_EQ(fresh.train(3, 6), expected) << "rank " << world.rank() << " of " << ranks;
      testing::expect_same(full_state(*fresh.picture.model), full_state(*run.picture.model));
      load(folder / "a", into, world);  // replaces the state that the optimizer has by now
      EXPECT_EQ(fresh.train(3, 6), expected);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Of, TorchState,
                         ::testing::Values("Adam", "Amsgrad", "AdamW", "SGD", "Momentum", "Adagrad", "RMSprop", "CenteredRMSprop"),
                         [](const auto& info) { return info.param; });

TEST(StateOfTorch, IsRefusedByNameWhereItDoesNotFit) {
  const Folder folder;
  testing::with_ranks(2, [&](const Communicator& world) {
    const TorchRun adam(world, kAdam), amsgrad(world, kAmsgrad), momentum(world, kMomentum);
    const TorchRun lbfgs(world, make<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1)));
    EXPECT_THAT(message_of<UsageError>([&] { save(folder / "none", lbfgs.contents(), world); }),
                HasSubstr("can't hold the state of a torch::optim::LBFGS"));
    adam.train(0, 1);
    save(folder / "a", adam.contents(), world);
    const auto refusal = [&](const TorchRun& run) {
      return message_of<UsageError>([&] {
        auto into = run.contents();
        load(folder / "a", into, world);
      });
    };
    EXPECT_THAT(refusal(momentum), HasSubstr("is of a torch::optim::Adam, but is loaded into a torch::optim::SGD"));
    EXPECT_THAT(refusal(amsgrad), HasSubstr("no 'max_exp_avg_sq', which this optimizer needs"));
    EXPECT_THAT(refusal(lbfgs), HasSubstr("torch::optim::LBFGS"));
    amsgrad.train(0, 1);
    save(folder / "with-more", amsgrad.contents(), world);
    auto into = adam.contents();
    EXPECT_THAT(message_of<UsageError>([&] { load(folder / "with-more", into, world); }),
                HasSubstr("has a 'max_exp_avg_sq', which this optimizer does not keep"));
    EXPECT_THAT(message_of<UsageError>([&] { testing::load(folder / "a", adam.picture); }),
                HasSubstr("loaded into a tessera::optim::AdamW"));
  });
}

}  // namespace
}  // namespace tessera::checkpoint::torch_state_test
