// Ranks that shard different modules, or in different ways: all of them are told what differs, and nothing has changed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/fully_shard.h"
#include "tests/testing/net.h"

namespace tessera::testing::agreement_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// Expects an error on each of three ranks when it shards the module that `make` returns.
void expect_told(const std::function<std::shared_ptr<nn::Module>(int rank)>& make, const std::string& first, const std::string& second,
                 const std::function<void(ShardOptions& options, int rank)>& choose = {}) {
  with_ranks(3, [&](const Communicator& world) {
    const auto model = make(world.rank());
    const auto before = model->parameters().front();
    ShardOptions options{.mesh = world};
    if (choose) choose(options, world.rank());
    EXPECT_THAT(message_of<DisagreementError>([&] { fully_shard(model, options); }), AllOf(HasSubstr(first), HasSubstr(second)));
    EXPECT_TRUE(model->parameters().front().is_same(before));
    EXPECT_EQ(model->parameters().front().sizes(), before.sizes());
    const auto same = std::make_shared<nn::LinearImpl>(3, 2);
    fully_shard(same, {.mesh = world, .start = Start::FromRank0});  // all may continue
  });
}

std::shared_ptr<nn::Module> linear(int64_t in, int64_t out, bool bias = true) {
  return std::make_shared<nn::LinearImpl>(nn::LinearOptions(in, out).bias(bias));
}

TEST(Agreement, NamesAnotherShape) {
  expect_told([](int rank) { return linear(4, rank == 1 ? 6 : 5); }, "ranks 0 and 2: parameter 'weight' of Float [5, 4], trained",
              "rank 1: parameter 'weight' of Float [6, 4], trained");
}

TEST(Agreement, NamesAParameterThatOthersDoNotHave) {
  expect_told([](int rank) { return linear(4, 5, rank != 2); }, "ranks 0 and 1: parameter 'bias' of Float [5], trained",
              "rank 2: no parameter 'bias'");
}

TEST(Agreement, NamesAnotherDtype) {
  const auto make = [](int rank) {
    auto model = linear(4, 5);
    if (rank == 2) model->to(at::kDouble);
    return model;
  };
  expect_told(make, "ranks 0 and 1: parameter 'weight' of Float", "rank 2: parameter 'weight' of Double");
}

TEST(Agreement, NamesAnotherOrderInMemory) {
  const auto make = [](int rank) {
    auto model = std::make_shared<nn::LinearImpl>(nn::LinearOptions(4, 5).bias(false));
    if (rank == 0) model->weight.set_data(at::ones({4, 5}).t());
    return model;
  };
  for (const auto start : {Start::Equal, Start::Loaded, Start::FromRank0}) {
    expect_told(make, "rank 0: parameter 'weight' of Float [5, 4], trained, strides [1, 5]",
                "ranks 1 and 2: parameter 'weight' of Float [5, 4], trained", [&](ShardOptions& options, int) { options.start = start; });
  }
  expect_told([](int) { return linear(4, 5); }, "rank 1: parameter 'weight' of Float [5, 4], trained, divided along 1", "divided along 0",
              [](ShardOptions& options, int rank) {
                options.layout = Layout::Rows;
                options.shard_dim = [rank](const std::string&, const at::Tensor& tensor) {
                  return std::optional<int64_t>(rank == 1 ? tensor.dim() - 1 : 0);
                };
              });
}

TEST(Agreement, NamesWhatIsFrozenElsewhere) {
  const auto make = [](int rank) {
    auto model = linear(4, 5);
    model->parameters()[1].set_requires_grad(rank != 0);
    return model;
  };
  expect_told(make, "rank 0: parameter 'bias' of Float [5], frozen", "ranks 1 and 2: parameter 'bias' of Float [5], trained");
}

TEST(Agreement, NamesAnotherOrder) {
  const auto make = [](int rank) {
    auto model = std::make_shared<nn::SequentialImpl>();
    model->push_back(rank == 0 ? "a" : "b", nn::Linear(2, 2));
    model->push_back(rank == 0 ? "b" : "a", nn::Linear(2, 2));
    return model;
  };
  expect_told(make, "rank 0: parameter 'a.weight' of", "ranks 1 and 2: parameter 'b.weight' of");
}

TEST(Agreement, NamesALayerThatOnlyOneRankHas) {
  const auto make = [](int rank) {
    nn::Sequential model;
    for (int i = 0; i < (rank == 1 ? 3 : 2); i++) model->push_back(nn::Linear(2, 2));
    return model.ptr();
  };
  expect_told(make, "ranks 0 and 2: no parameter '2.weight'", "rank 1: parameter '2.weight' of Float [2, 2], trained");
}

TEST(Agreement, NamesOtherOptions) {
  const auto same = [](int) { return linear(4, 5); };
  expect_told(same, "ranks 0 and 2: max_live_units 2", "rank 1: max_live_units 3",
              [](ShardOptions& options, int rank) { options.schedule.max_live_units = rank == 1 ? 3 : 2; });
  expect_told(same, "rank 0: reshard_after_forward of inner units 1", "ranks 1 and 2: reshard_after_forward of inner units 3",
              [](ShardOptions& options, int rank) { options.reshard_after_forward = rank != 0; });
  expect_told(same, "offload.parameters Nowhere", "rank 2: offload.parameters Disk", [](ShardOptions& options, int rank) {
    if (rank == 2) options.offload.parameters = OffloadTo::Disk;
  });
  expect_told(same, "param_dtype BFloat16", "param_dtype unset", [](ShardOptions& options, int rank) {
    if (rank == 1) options.mixed_precision.param_dtype = at::kBFloat16;
  });
}

}  // namespace
}  // namespace tessera::testing::agreement_test
