// MixedPrecision::buffer_dtype: buffers in another dtype while a model trains, and in their own in checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::buffer_dtype_test {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

struct NormedImpl : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(6, 4));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(4));
  nn::Linear b = register_module("b", nn::Linear(4, 2));
  NormedImpl() { fill_with_numbers(*this); }
  at::Tensor forward(const at::Tensor& x) { return b(torch::tanh(norm(a(x)))); }
};
TORCH_MODULE(Normed);

Normed sharded(const Communicator& world, const MixedPrecision& precision) {
  Normed model;
  fully_shard(model, {.mesh = world, .mixed_precision = precision});
  return model;
}

TEST(BufferDtype, IsThatOfFloatingBuffersAlone) {
  with_ranks(2, [](const Communicator& world) {
    Normed model;
    const auto phase = model->register_buffer("phase", at::ones({2}, at::kComplexFloat));
    fully_shard(model, {.mesh = world, .mixed_precision = {.buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(model->norm->running_mean.is_same(model->named_buffers()["norm.running_mean"]));
    EXPECT_EQ(model->norm->num_batches_tracked.scalar_type(), at::kLong);
    EXPECT_EQ(phase.scalar_type(), at::kComplexFloat);
  });
}

TEST(BufferDtype, OfAnInnerModuleWins) {
  with_ranks(2, [](const Communicator& world) {
    Normed model;
    fully_shard(model->norm, {.mesh = world, .mixed_precision = {.buffer_dtype = at::kFloat}});
    model->register_buffer("own", at::ones({2}));
    fully_shard(model, {.mesh = world, .mixed_precision = {.buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(model->norm->running_var.scalar_type(), at::kFloat);
    EXPECT_EQ(model->named_buffers()["own"].scalar_type(), at::kBFloat16);
  });
}

/// The statistics are those of replicated training in the same dtypes.
TEST(BufferDtype, TrainsBatchNormInEveryCombination) {
  const std::vector<std::optional<at::ScalarType>> dtypes = {std::nullopt, at::kBFloat16};
  for (const auto params : dtypes) {
    for (const auto buffers : dtypes) {
      with_ranks(2, [&](const Communicator& world) {
        auto model = sharded(world, {.param_dtype = params, .buffer_dtype = buffers});
        optim::SGD optimizer(parameters(*model), {.lr = 0.1});
        double first = 0, last = 0;
        for (int step = 0; step < 10; step++) {
          const auto loss = model->forward(numbers({8, 6}, world.rank())).to(at::kFloat).sub(1).pow(2).mean();
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          (step == 0 ? first : last) = loss.item<double>();
        }
        EXPECT_LT(last, 0.8 * first);
        EXPECT_EQ(model->norm->running_mean.scalar_type(), buffers.value_or(at::kFloat));
        model->eval();
        EXPECT_TRUE(model->forward(numbers({8, 6})).isfinite().all().item<bool>());
      });
    }
  }
}

/// Batch norm computes in float32, whatever it reads and writes.
TEST(BufferDtype, RoundsOnlyTheStatisticsThemselves) {
  with_ranks(2, [](const Communicator& world) {
    auto model = sharded(world, {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16});
    Normed narrow;
    narrow->a->to(at::kBFloat16);
    narrow->b->to(at::kBFloat16);
    for (auto& parameter : narrow->norm->parameters()) parameter.set_data(parameter.detach().to(at::kBFloat16).to(at::kFloat));
    const auto x = numbers({8, 6});
    const auto y = model->forward(x), expected = narrow->forward(x.to(at::kBFloat16));
    EXPECT_TRUE(at::equal(y, expected));
    EXPECT_TRUE(at::equal(model->norm->running_mean, narrow->norm->running_mean.to(at::kBFloat16)));
    EXPECT_TRUE(at::equal(model->norm->running_var, narrow->norm->running_var.to(at::kBFloat16)));
    y.sum().backward();
    expected.sum().backward();
    EXPECT_TRUE(at::equal(full_grad(model->norm->weight), narrow->norm->weight.grad().to(at::kBFloat16).to(at::kFloat)));
  });
}

TEST(BufferDtype, IsNotThatOfCheckpoints) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto model = sharded(world, {.buffer_dtype = at::kBFloat16});
    model->norm->running_mean.fill_(0.5);
    EXPECT_EQ(full_tensor(*model, "norm.running_mean").scalar_type(), at::kFloat);
    checkpoint::save(folder / "step", {.model = model.get()}, world);
    for (const auto dtype : {std::optional(at::kBFloat16), std::optional<at::ScalarType>()}) {
      auto other = sharded(world, {.buffer_dtype = dtype});
      checkpoint::Contents contents{.model = other.get()};
      checkpoint::load(folder / "step", contents, world);
      EXPECT_EQ(other->norm->running_mean[0].item<float>(), 0.5F);
      EXPECT_EQ(other->norm->running_mean.scalar_type(), dtype.value_or(at::kFloat));
    }
  });
}

TEST(BufferDtype, IsNotThatOfBuffersThatAreIgnored) {
  with_ranks(2, [](const Communicator& world) {
    Normed model;
    const auto table = model->register_buffer("table", at::ones({2}));
    const ShardOptions options{.mesh = world, .mixed_precision = {.buffer_dtype = at::kBFloat16}, .ignored = {model->norm->running_mean}};
    fully_shard(model->norm, options);
    fully_shard(model, {.mesh = world, .mixed_precision = {.buffer_dtype = at::kHalf}, .ignored = {table}});
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(model->norm->running_var.scalar_type(), at::kBFloat16);
    EXPECT_EQ(table.scalar_type(), at::kFloat);
    Normed other, policy;
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(other, {.mesh = world, .ignored = {model->norm->running_var}}); }),
                HasSubstr("is no parameter of Normed"));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(other, {.mesh = world, .replicated = {other->norm->running_var}}); }),
                HasSubstr("is no parameter of Normed"));
    fully_shard(policy, {.mesh = world, .mixed_precision = {.buffer_dtype = at::kBFloat16}, .ignored = buffers_of_modules(*policy, "norm")},
                wrap_classes({"BatchNorm1d"}));
    EXPECT_EQ(policy->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(policy->norm->running_var.scalar_type(), at::kFloat);
  });
}

}  // namespace
}  // namespace tessera::testing::buffer_dtype_test
