// The report's counters, and warnings about steps that are more than one program.
#include "tessera/xla/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/values.h"
#include "tests/testing/child_task.h"
#include "tests/testing/run_program.h"
#include "tests/testing/warnings.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tessera::testing::Warnings;

int64_t times_read(const std::string& reader) {
  const auto reads = metrics().host_reads;
  const auto found = reads.find(reader);
  return found == reads.end() ? 0 : found->second;
}

TEST(Metrics, CountProgramsExecutionsAndBytes) {
  auto x = torch::ones({1000}, device_for_tests());
  step_boundary();
  const auto before = metrics();
  for (int step = 0; step < 3; step++) {
    x.mul_(0.5).add_(torch::ones({1000}).to(device_for_tests()));
    step_boundary();
  }
  auto now = metrics();
  EXPECT_EQ(now.compiles + now.loaded_from_disk, before.compiles + before.loaded_from_disk + 1);
  EXPECT_EQ(now.programs.size(), before.programs.size() + 1);
  EXPECT_EQ(now.programs.back().executions, 3);
  EXPECT_EQ(now.programs.back().memory.outputs, 4000);
  EXPECT_GT(now.programs.back().operations, 2);
  EXPECT_EQ(now.executions, before.executions + 3);
  EXPECT_EQ(now.cache_hits, before.cache_hits + 2);
  EXPECT_EQ(now.bytes_uploaded, before.bytes_uploaded + 3 * 4000);
  EXPECT_GT(now.seconds_compiling, before.seconds_compiling);
  (void)x.cpu();
  now = metrics();
  EXPECT_EQ(now.bytes_downloaded, before.bytes_downloaded + 4000);
}

TEST(Metrics, AReportHasThemAll) {
  (void)torch::ones({2}, device_for_tests()).cpu();
  (void)torch::histc(torch::ones({2}, device_for_tests()), 4, 0, 1).cpu();
  const auto report = metrics_report();
  for (const auto* text : {"XLA devices: 1 of ", "compiled", "loaded from disk", "MB uploaded", "aten::histc, 1 times", "program 1 ", "temporary"}) {
    EXPECT_THAT(report, HasSubstr(text));
  }
}

const testing::ChildTask short_run("run on xla", [](const std::string&) {
  (void)torch::ones({2}, device_for_tests()).cpu();
  return 0;
});

TEST(Metrics, AreReportedAtTheEndIfTheEnvironmentAsksForIt) {
  const auto printed = [](const char* wanted) { return testing::run_program({this_program()}, short_run.environment({}, {{"TESSERA_XLA_METRICS", wanted}})); };
  const auto reported = printed("1");
  EXPECT_EQ(reported.status, 0);
  EXPECT_THAT(reported.output, AllOf(HasSubstr("XLA devices: 1 of "), HasSubstr("  programs    1 compiled")));
  EXPECT_EQ(printed("0").output, "");
  EXPECT_THAT(printed("yes").output, HasSubstr("TESSERA_XLA_METRICS"));
}

TEST(HostReads, InTheMiddleOfAStepAreNamedOnce) {
  const auto cut_steps = [](int steps) {
    auto x = torch::ones({4}, device_for_tests());
    for (int step = 0; step < steps; step++) {
      const auto y = x * 2;
      const auto sum = y.sum().item<float>();
      x = y / sum;
      step_boundary();
    }
  };
  const auto before = times_read("item()");
  Warnings warnings;
  cut_steps(3);
  EXPECT_EQ(times_read("item()"), before + 3);
  cut_steps(1);
  EXPECT_THAT(warnings.texts, ElementsAre(HasSubstr("item() reads a value in the middle of a step")));
}

TEST(HostReads, AtTheEndOfAStepAreNotCounted) {
  const auto before = metrics().host_reads;
  Warnings warnings;
  auto x = torch::ones({5}, device_for_tests());
  for (int step = 0; step < 3; step++) {
    x = x * 2;
    step_boundary();
    (void)x.sum().item<float>();  // a program of its own, of which no other result remains
    (void)x.cpu();
  }
  x = x * 2;
  (void)x.sum().item<float>();  // nothing is left for the boundary
  step_boundary();
  EXPECT_EQ(metrics().host_reads, before);
  EXPECT_THAT(warnings.texts, IsEmpty());
}

TEST(HostReads, OfAModelsMetricsCutNothing) {
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(13, 12), torch::nn::BatchNorm1d(12), torch::nn::Linear(12, 2));
  to_device(*model);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto before = metrics().host_reads;
  const Warnings warnings;
  auto right = torch::zeros({}, device_for_tests());
  const auto evaluate = [&] {
    const torch::NoGradGuard no_grad;
    at::Tensor scores;  // a batch's scores live until the next batch's
    for (int batch = 0; batch < 4; batch++) {
      scores = model->forward(torch::ones({3, 13}).to(device_for_tests()));
      right += scores.argmax(1).eq(batch % 2).sum();
      (void)scores.pow(2).mean().item<float>();
    }
  };
  for (int step = 0; step < 4; step++) {
    optimizer.zero_grad();
    const auto loss = model->forward(torch::ones({3, 13}).to(device_for_tests())).pow(2).mean();
    loss.backward();
    optimizer.step();
    (void)loss.item<float>();  // in place of step_boundary()
    if (step == 2) evaluate();
  }
  EXPECT_EQ(metrics().host_reads, before);
  EXPECT_THAT(warnings.texts, IsEmpty());
}

TEST(HostReads, OfALossBeforeItsBackwardPassCutEachStep) {
  auto weight = torch::ones({11}, device_for_tests()).requires_grad_();
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.1));
  const auto before = times_read("item()");
  for (int step = 0; step < 3; step++) {
    optimizer.zero_grad();
    const auto loss = (weight * 3).exp().sum();
    (void)loss.item<float>();
    loss.backward();
    (void)weight.grad().norm().item<float>();
    optimizer.step();
    step_boundary();
  }
  EXPECT_EQ(times_read("item()"), before + 6);
}

TEST(Growth, OfWhatIsNeverComputedIsToldOfOnce) {
  const Warnings warnings;
  auto x = torch::ones({4}, device_for_tests());
  for (int i = 0; i < 3000; i++) x = torch::celu(x);
  EXPECT_THAT(warnings.texts, IsEmpty());
  for (int i = 0; i < 210000; i++) x = x.abs();
  EXPECT_THAT(warnings.texts, ElementsAre(HasSubstr("200000 operations wait to become one program: call step_boundary()")));
}

TEST(Recompilation, OfAStepIsToldOfWithWhatDiffers) {
  auto weight = torch::ones({6}, device_for_tests());
  Warnings warnings;
  for (int64_t rows = 9; rows > 4; rows--) {
    weight += torch::ones({rows, 6}).to(device_for_tests()).sum(0);
    step_boundary();
  }
  EXPECT_THAT(warnings.texts, ElementsAre(HasSubstr("(tensor<7x6xf32>, tensor<f32>) -> tensor<6xf32>, which were (tensor<8x6xf32>")));
}

/// Returns how many programs a step needs for the numbers of a schedule.
int64_t programs_for(const std::function<void(at::Tensor& weight, double number)>& step) {
  auto weight = torch::ones({7}, device_for_tests());
  step_boundary();
  const auto before = metrics().programs.size();
  for (const double number : {0.3, 0.7, 1.0, 0.5, 0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    step(weight, number);
    step_boundary();
  }
  return static_cast<int64_t>(metrics().programs.size() - before);
}

TEST(Recompilation, NumbersNeedNoneAlsoWhereTheyAreZeroOrOne) {
  EXPECT_EQ(programs_for([](at::Tensor& weight, double number) { weight *= number; }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& weight, double number) { weight.add_(weight.exp(), -number); }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& weight, double number) { weight.lerp_(weight.exp(), number); }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& weight, double number) { weight.addcdiv_(weight.exp(), weight.sqrt() / number, number); }), 1);
  EXPECT_EQ(programs_for([](at::Tensor& weight, double number) { weight.copy_(weight.addmv(weight.outer(weight), weight, 1, number)); }), 1);
}

}  // namespace
}  // namespace tessera::xla
