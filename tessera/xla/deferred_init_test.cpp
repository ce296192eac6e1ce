// A deferred model gets its values on the devices among which it is sharded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/models/gpt.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/wrap.h"
#include "tessera/xla/init.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/transports.h"

namespace tessera::xla::deferred_init_test {
namespace {

constexpr int kDevices = 4;

const Communicator& world() {
  static const auto devices = init({.devices = kDevices});
  return devices;
}

models::Gpt make() { return models::Gpt(models::GptOptions{.vocabulary = 50, .width = 64, .layers = 3, .heads = 2, .longest = 8}); }

using State = std::map<std::string, at::Tensor>;

State state_of_ranks(const DeferredInitOptions& options) {
  State state;
  testing::run_world({.transport = "threads", .ranks = 1}, [&](const Communicator& alone) {
    torch::manual_seed(3);
    auto model = deferred_init(make, options);
    fully_shard(model, {.mesh = alone}, wrap_always());
    state = full_state(*model);
  });
  return state;
}

class DeferredModels : public ::testing::TestWithParam<DeferredInitOptions> {};
INSTANTIATE_TEST_SUITE_P(Seeds, DeferredModels, ::testing::Values(DeferredInitOptions{}, DeferredInitOptions{.seed = 5}),
                         [](const auto& info) { return info.param.seed ? "OfEachTensor" : "OfTheGenerator"; });

TEST_P(DeferredModels, StartAsOnRanks) {
  torch::manual_seed(3);
  auto model = deferred_init(make, GetParam());
  fully_shard(model, {.mesh = world()}, wrap_always());
  const auto expected = state_of_ranks(GetParam());
  for (const auto& [name, whole] : full_state(*model)) {
    for (const auto& value : world().replicas(whole)) EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
  }
}

TEST(DeferredModel, SendsEachDeviceItsPartAlone) {
  (void)world();
  const auto before = metrics().bytes_uploaded;
  auto model = deferred_init(make, {.seed = 5});
  fully_shard(model, {.mesh = world()}, wrap_always());
  int64_t whole = 0;
  for (const auto& parameter : make()->parameters()) whole += static_cast<int64_t>(parameter.nbytes());
  EXPECT_LT(metrics().bytes_uploaded - before, whole * 5 / 4) << "all devices together get the model once, and a part's padding";
}

}  // namespace
}  // namespace tessera::xla::deferred_init_test
