// What holds on a GPU only, or may differ there: nobody waits for it in a step, its numbers are the host's, and it may run out of memory.
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "cuda_calls.h"
#include "tessera/base/error.h"
#include "tessera/models/gpt.h"
#include "tessera/tessera.h"
#include "tests/testing/transports.h"

namespace tessera::testing::gpu_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const at::Device kGpu(at::kCUDA, 0);

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU here";
  }
};

Communicator world() {
  return init({.device = kGpu});
}

// --- A model in training ---

constexpr models::GptOptions kSizes = {.vocabulary = 64, .width = 64, .layers = 3, .heads = 4, .longest = 16};

models::Gpt seeded_gpt(at::Device device) {
  static std::mutex generator;  // of ranks that are threads
  const std::lock_guard lock(generator);
  torch::manual_seed(3);
  models::Gpt gpt(kSizes);
  gpt->to(device);
  return gpt;
}

void shard(const models::Gpt& gpt, const Communicator& world, const MixedPrecision& precision = {}) {
  for (const auto& block : *gpt->blocks) fully_shard(block, {.mesh = world, .mixed_precision = precision});
  fully_shard(gpt, {.mesh = world, .mixed_precision = precision});
}

at::Tensor tokens(at::Device device) {
  return at::arange(2 * kSizes.longest, at::kLong).mul(7).remainder(kSizes.vocabulary).view({2, kSizes.longest}).to(device);
}

struct Training {
  models::Gpt gpt;
  at::Tensor batch;
  optim::AdamW optimizer;

  explicit Training(const models::Gpt& model, at::Device device)
      : gpt(model), batch(tokens(device)), optimizer(parameters(*model), {.lr = 1e-3, .eps = 1e-4}) {}

  at::Tensor step() {
    const auto loss = at::cross_entropy_loss(gpt(batch).flatten(0, 1), batch.roll(-1, 1).flatten());
    loss.backward();
    optimizer.clip_grad_norm(0.5);
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  }

  /// The losses of five steps.
  at::Tensor losses() {
    std::vector<at::Tensor> all;
    for (int i = 0; i < 5; i++) all.push_back(step());
    return at::stack(all).cpu();
  }
};

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST_F(Gpu, IsNotWaitedForInAStep) {
  const auto gpt = seeded_gpt(kGpu);
  shard(gpt, world());
  Training training(gpt, kGpu);
  for (int i = 0; i < 3; i++) training.step();
  const CudaCalls waits;
  training.step();
  training.step();
  EXPECT_THAT(waits.calls(), IsEmpty());
  training.step().item<float>();
  EXPECT_THAT(waits.calls(), Not(IsEmpty())) << "this test does not see what it looks for";
}

/// Counts the requests of forward and backward to the GPU.
int64_t requests_of_a_pass(Training& training) {
  for (int i = 0; i < 3; i++) training.step();
  training.step().item<float>();
  const auto before = requests();
  at::cross_entropy_loss(training.gpt(training.batch).flatten(0, 1), training.batch.roll(-1, 1).flatten()).backward();
  const auto after = requests();
  training.optimizer.zero_grad();
  return after - before;
}

TEST_F(Gpu, PacksTheGradientsOfAUnitAndIsAskedForNothingElse) {
  const auto sharded = seeded_gpt(kGpu);
  shard(sharded, world());
  Training own(sharded, kGpu), plain(seeded_gpt(kGpu), kGpu);
  const auto asked = requests_of_a_pass(own), asked_by_plain = requests_of_a_pass(plain);
  RecordProperty("sharded", static_cast<int>(asked));
  RecordProperty("plain", static_cast<int>(asked_by_plain));
  EXPECT_GT(asked_by_plain, 20 * kSizes.layers) << "this test does not see what it counts";
  EXPECT_LE(asked - asked_by_plain, kSizes.layers + 1) << asked << " calls, and " << asked_by_plain << " without sharding";
}

TEST_F(Gpu, TrainsShardedAsWholeAndAsTheHost) {
  const auto sharded = seeded_gpt(kGpu);
  shard(sharded, world());
  const auto losses = Training(sharded, kGpu).losses();
  EXPECT_LE(largest_difference(losses, Training(seeded_gpt(kGpu), kGpu).losses()), 1e-6);
  EXPECT_LE(largest_difference(losses, Training(seeded_gpt(at::kCPU), at::kCPU).losses()), 1e-5);
  EXPECT_LT(losses[4].item<float>(), losses[0].item<float>());
}

/// The mean losses of ranks that share a GPU, or are all on the host. Each has a batch of its own.
at::Tensor losses_of_ranks(int ranks, at::Device device, const MixedPrecision& precision) {
  at::Tensor result;
  run_ranks(ranks,
            [&](const Communicator& world) {
              const auto gpt = seeded_gpt(device);
              shard(gpt, world, precision);
              Training training(gpt, device);
              training.batch = (training.batch + world.rank()).remainder(kSizes.vocabulary);
              const auto losses = training.losses().to(device);
              world.all_reduce(losses, {.op = Reduce::Mean}).wait();
              if (world.rank() == 0) result = losses.cpu();
            },
            {.device = device});
  return result;
}

TEST_F(Gpu, IsSharedByRanksThatTrainAsOnTheHost) {
  for (const int ranks : {2, 3, 4}) {
    EXPECT_LE(largest_difference(losses_of_ranks(ranks, kGpu, {}), losses_of_ranks(ranks, at::kCPU, {})), 1e-5) << ranks;
    const MixedPrecision narrow{.param_dtype = at::kBFloat16};
    EXPECT_LE(largest_difference(losses_of_ranks(ranks, kGpu, narrow), losses_of_ranks(ranks, at::kCPU, narrow)), 5e-2) << ranks;
  }
}

TEST_F(Gpu, GetsModelsThatWereMadeWithoutMemory) {
  torch::manual_seed(3);
  auto deferred = deferred_init([] { return models::Gpt(kSizes); });
  shard(deferred, world());
  const auto losses = Training(deferred, kGpu).losses();
  EXPECT_LE(largest_difference(losses, Training(seeded_gpt(kGpu), kGpu).losses()), 1e-6);
}

// --- Optimizers ---

using Make = std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>;

/// The parameters after five steps with drawn gradients, clipped to a norm that is given.
at::Tensor updated(const Make& make, at::Device device, at::Tensor& norm) {
  torch::manual_seed(7);
  std::vector<at::Tensor> parameters;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{33, 17}, {1025}, {}}) {
    parameters.push_back(torch::randn(shape).to(device).requires_grad_());
  }
  const auto optimizer = make(parameters);
  for (int step = 0; step < 5; step++) {
    for (auto& parameter : parameters) parameter.mutable_grad() = torch::randn(parameter.sizes()).to(device);
    norm = optimizer->clip_grad_norm(3).cpu();
    optimizer->step();
    optimizer->zero_grad();
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) result.push_back(parameter.detach().flatten().cpu());
  return at::cat(result);
}

template <class Optimizer, class Options>
void expect_as_on_the_host(const Options& options) {
  const Make make = [&](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
  at::Tensor norm, norm_on_host;
  const auto values = updated(make, kGpu, norm), on_host = updated(make, at::kCPU, norm_on_host);
  EXPECT_LE((values - on_host).norm().item<double>(), 1e-6 * on_host.norm().item<double>());
  EXPECT_NEAR(norm.item<double>(), norm_on_host.item<double>(), 1e-6 * norm_on_host.item<double>());
}

TEST_F(Gpu, TakesTheStepsOfTheHost) {
  expect_as_on_the_host<optim::AdamW>(optim::AdamWOptions{.lr = 1e-2});
  expect_as_on_the_host<optim::Adam>(optim::AdamOptions{.lr = 1e-2, .weight_decay = 0.1});
  expect_as_on_the_host<optim::SGD>(optim::SgdOptions{.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.1});
  expect_as_on_the_host<optim::Lamb>(optim::LambOptions{.lr = 1e-2});
  expect_as_on_the_host<optim::Lion>(optim::LionOptions{.lr = 1e-2, .weight_decay = 0.1});
}

TEST_F(Gpu, SkipsAStepWhoseScaledGradientsAreInf) {
  torch::manual_seed(1);
  auto layer = torch::nn::Linear(8, 8);
  layer->to(kGpu, at::kHalf);
  fully_shard(layer, {.mesh = world()});
  optim::SGD optimizer(parameters(*layer), {.lr = 0.1});
  optim::GradScaler scaler({.init_scale = 1024});
  const auto weight = [&] { return to_local(layer->weight).cpu().clone(); };
  const auto step = [&](const at::Tensor& batch) {
    scaler.scale(layer(batch).to(at::kFloat).mean()).backward();
    const bool taken = scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    return taken;
  };
  const auto batch = at::ones({4, 8}, at::TensorOptions().dtype(at::kHalf).device(kGpu));
  const auto before = weight();
  EXPECT_FALSE(step(batch * 60000));
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_TRUE(at::equal(weight(), before));
  EXPECT_TRUE(step(batch));
  EXPECT_EQ(scaler.get_scale(), 512);
  EXPECT_FALSE(at::equal(weight(), before));
}

// --- Memory ---

TEST_F(Gpu, SaysForWhichUnitThereIsNoRoom) {
  torch::manual_seed(1);
  auto model = torch::nn::Sequential(torch::nn::Linear(4096, 4096), torch::nn::Linear(4096, 4096));
  model->to(kGpu);
  const auto ranks = world();
  for (const auto& layer : *model) fully_shard(layer.ptr(), {.mesh = ranks, .mixed_precision = {.param_dtype = at::kBFloat16}});
  const torch::NoGradGuard no_grad;
  const auto batch = at::ones({1, 4096}, at::TensorOptions().device(kGpu));
  batch.matmul(batch.t());  // so that libraries have their own memory
  torch::cuda::synchronize();
  namespace memory = c10::cuda::CUDACachingAllocator;
  memory::emptyCache();
  const auto reserved = memory::getDeviceStats(0).reserved_bytes[0].current;
  const auto all = at::cuda::getDeviceProperties(0)->totalGlobalMem;
  memory::setMemoryFraction((static_cast<double>(reserved) + 20e6) / static_cast<double>(all), 0);  // one layer takes 34 MB
  std::string error;
  try {
    model->forward(batch);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  memory::setMemoryFraction(1, 0);
  EXPECT_TRUE(model->forward(batch).isfinite().all().item<bool>());
  EXPECT_THAT(error, HasSubstr("has no room for 33562624 bytes of unit '"));
  EXPECT_THAT(error, HasSubstr("bytes of unsharded parameters are there"));
  EXPECT_THAT(error, HasSubstr("CUDA out of memory"));
}

}  // namespace
}  // namespace tessera::testing::gpu_test
