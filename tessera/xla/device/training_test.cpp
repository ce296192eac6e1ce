// Unmodified modules train on the device as on the CPU.
#include <gtest/gtest.h>

#include <set>

#include "tests/testing/xla_training.h"

namespace tessera::xla {
namespace {

using namespace cases;

/// Each model, optimizer and dtype once; training_long_test has all combinations.
std::vector<Case> quick_cases() {
  const std::set<std::string> names{"MlpSgd", "MlpAdamWInBf16", "MlpSgdInFp16", "MnistNetSgd", "GptAdamW", "BertSgd", "BlockOfAResNetSgd"};
  auto all = all_cases();
  std::erase_if(all, [&](const Case& each) { return !names.contains(each.name); });
  return all;
}

class Training : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Quick, Training, ::testing::ValuesIn(quick_cases()), [](const auto& info) { return info.param.name; });
TEST_P(Training, HasTheLossesOfTheCpu) { expect_losses_of_the_cpu(GetParam()); }

/// Trains for some epochs of three batches, of which the last is smaller, and evaluates after each.
int64_t programs_of_epochs(MakeOptimizer make_optimizer) {
  const auto device = device_for_tests();
  const auto before = metrics().programs.size();
  torch::manual_seed(3);
  const auto whole = mlp(7);
  to_device(*whole.module);
  auto model = whole.module->as<torch::nn::Sequential>();
  const auto optimizer = make_optimizer(whole.module->parameters());
  torch::optim::StepLR schedule(*optimizer, 1, 0.7);
  std::vector<at::Tensor> scores;
  for (int epoch = 0; epoch < 4; epoch++) {
    for (const int64_t rows : {7, 7, 5}) {
      optimizer->zero_grad();
      const auto loss = torch::nn::functional::cross_entropy(model->forward(drawn(epoch, {rows, 16}).to(device)), words(epoch, {rows}, 10).to(device));
      loss.backward();
      optimizer->step();
      step_boundary();
    }
    schedule.step();
    const torch::NoGradGuard no_grad;
    scores.push_back(model->forward(drawn(9, {6, 16}).to(device)).argmax(1));
    step_boundary();
  }
  return static_cast<int64_t>(metrics().programs.size() - before);
}

TEST(Programs, OfEpochsWithAScheduleEvaluationAndAnUnevenLastBatch) {
  EXPECT_EQ(programs_of_epochs([](auto p) -> Optimizer { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1)); }), 3);
  EXPECT_EQ(programs_of_epochs(adamw), 3);  // the first step makes the moments; the evaluation's program existed before
}

TEST(Seeds, MakeTrainingReproducible) {
  const auto with_seed = [](uint64_t seed) {
    const auto subject = [] {
      torch::nn::Sequential model(torch::nn::Linear(16, 64), torch::nn::Dropout(0.5), torch::nn::Linear(64, 10));
      auto made = mlp();
      made.module = model.ptr();
      made.scores = [=](const at::Tensor& x) mutable { return model->forward(x); };
      return made;
    };
    torch::manual_seed(3);
    const auto made = subject();
    to_device(*made.module);
    torch::manual_seed(seed);
    const auto optimizer = adamw(made.module->parameters());
    std::vector<at::Tensor> losses;
    for (int step = 0; step < 5; step++) step_once(made, *optimizer, step, device_for_tests(), losses);
    return cases::numbers(losses);
  };
  device_for_tests();
  const auto losses = with_seed(5);
  EXPECT_EQ(with_seed(5), losses);
  EXPECT_NE(with_seed(6), losses);
}

}  // namespace
}  // namespace tessera::xla
