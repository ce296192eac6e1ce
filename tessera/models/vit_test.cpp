// A ViT with the weights of transformers' ViT gives the same results, whole and sharded.
#include "tessera/models/vit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::testing::vit_test {
namespace {

constexpr double kTolerance = 1e-4;

models::VitOptions small() { return {.image = 16, .patch = 4, .width = 24, .layers = 2, .heads = 4, .classes = 5}; }

TEST(Vit, HasTheScoresAndGradientsOfTransformers) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/vit_files.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package transformers";
  ASSERT_EQ(written.status, 0) << written.output;
  const checkpoint::SafetensorsFile expected(folder / "expected.safetensors");
  const auto expect_close = [&](const at::Tensor& ours, const std::string& name) {
    const auto theirs = expected.read(name);
    ASSERT_EQ(ours.sizes(), theirs.sizes()) << name;
    EXPECT_LT((ours - theirs).abs().max().item<double>(), kTolerance) << name;
  };
  with_ranks(2, [&](const Communicator& world) {
    for (const bool again : {false, true}) {
      auto model = deferred_init([] { return models::Vit(small()); });
      if (again) activation::checkpoint_modules(*model, wrap_classes({"VitBlock"}));
      fully_shard(model, {.mesh = world}, wrap_classes({"VitBlock"}));
      checkpoint::load_weights(*model, folder / "weights.safetensors");
      const auto scores = model(expected.read("images"));
      expect_close(scores.detach(), "scores");
      at::cross_entropy_loss(scores, at::tensor({0, 3, 4}, at::kLong)).backward();
      for (const auto& [name, parameter] : named_parameters(*model)) expect_close(full_grad(parameter), "gradient of " + name);
    }
  });
}

TEST(Vit, HasTheSizesOfItsNames) {
  const auto parameters_of = [](const models::VitOptions& options) {
    const auto model = deferred_init([&] { return models::Vit(options); }, {.seed = 1});  // draws no values before sharding
    int64_t sum = 0;
    for (const auto& parameter : model->parameters()) sum += parameter.numel();
    return static_cast<double>(sum);
  };
  EXPECT_NEAR(parameters_of(models::VitOptions::of_10b()), 10e9, 0.1e9);
  EXPECT_NEAR(parameters_of(models::VitOptions::of_60b()), 60e9, 0.6e9);
  EXPECT_THAT(message_of<UsageError>([] { models::Vit(models::VitOptions{.patch = 15}); }), ::testing::HasSubstr("224 by 224 can't be cut into patches of 15 by 15"));
}

}  // namespace
}  // namespace tessera::testing::vit_test
