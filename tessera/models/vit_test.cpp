// A ViT with the weights of transformers, timm or torchvision has the same results as theirs, whole and sharded.
#include "tessera/models/vit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <regex>

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

using ::testing::HasSubstr;

constexpr double kTolerance = 1e-4;
const std::string kGradient = "gradient of ";

struct Package {
  const char* name;
  models::VitOptions options;  // as in vit_files.py
};

void PrintTo(const Package& package, std::ostream* out) {
  *out << package.name;
}

models::VitOptions tiny() {
  auto options = models::VitOptions::tiny();
  options.layers = 2;
  options.classes = 5;
  return options;
}

class VitOf : public ::testing::TestWithParam<Package> {};

TEST_P(VitOf, HasTheSameScoresAndGradients) {
  const std::string package = GetParam().name;
  const auto& options = GetParam().options;
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/vit_files.py", folder.path(), package});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package " << package;
  ASSERT_EQ(written.status, 0) << written.output;
  const checkpoint::SafetensorsFile expected(folder / "expected.safetensors");
  const auto expect_close = [&](const at::Tensor& ours, const std::string& name) {
    const auto theirs = expected.read(name);
    ASSERT_EQ(ours.sizes(), theirs.sizes()) << name;
    EXPECT_LT((ours - theirs).abs().max().item<double>(), kTolerance) << name;
  };
  std::map<std::string, std::string> gradients;  // in the file, by our names of the parameters
  for (const auto& name : expected.names()) {
    if (!name.starts_with(kGradient)) continue;
    auto ours = name.substr(kGradient.size());
    for (const auto& [pattern, replacement] : models::VitImpl::renames()) ours = std::regex_replace(ours, std::regex(pattern), replacement);
    gradients[ours] = name;
  }
  with_ranks(2, [&](const Communicator& world) {
    for (const bool again : {false, true}) {
      auto model = deferred_init([&] { return models::Vit(options); });
      if (again) activation::checkpoint_modules(*model, wrap_classes({"VitBlock"}));
      fully_shard(model, {.mesh = world}, wrap_classes({"VitBlock"}));
      checkpoint::load_weights(*model, folder / "weights.safetensors", {.renamed = models::VitImpl::renames()});
      const auto scores = model(expected.read("images"));
      expect_close(scores.detach(), "scores");
      at::cross_entropy_loss(scores, at::tensor({0, 3, 4}, at::kLong)).backward();
      const auto all = named_parameters(*model);
      EXPECT_EQ(all.size(), gradients.size());
      for (const auto& [name, parameter] : all) expect_close(full_grad(parameter), gradients.at(name));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Packages, VitOf,
    ::testing::Values(Package{"transformers", {.image = 16, .patch = 4, .width = 24, .layers = 2, .heads = 4, .classes = 5}},
                      Package{"timm", tiny()},
                      Package{"torchvision", {.image = 32, .width = 48, .layers = 2, .heads = 4, .hidden = 96, .classes = 5}}),
    [](const auto& info) { return info.param.name; });

double parameters_of(const models::VitOptions& options) {
  const auto model = deferred_init([&] { return models::Vit(options); }, {.seed = 1});  // which draws nothing ahead
  int64_t sum = 0;
  for (const auto& parameter : model->parameters()) sum += parameter.numel();
  return static_cast<double>(sum);
}

TEST(Vit, HasTheSizesOfItsNames) {
  EXPECT_EQ(parameters_of(models::VitOptions::tiny()), 5'717'416);
  EXPECT_EQ(parameters_of(models::VitOptions::small()), 22'050'664);
  EXPECT_EQ(parameters_of(models::VitOptions::base()), 86'567'656);
  EXPECT_EQ(parameters_of(models::VitOptions::large()), 304'326'632);
  EXPECT_EQ(parameters_of(models::VitOptions::huge()), 632'045'800);
  EXPECT_EQ(parameters_of(models::VitOptions::giant()), 1'012'611'432);
  EXPECT_NEAR(parameters_of(models::VitOptions::of_10b()), 10e9, 0.1e9);
  EXPECT_NEAR(parameters_of(models::VitOptions::of_60b()), 60e9, 0.6e9);
}

TEST(Vit, RefusesImagesOfOtherSizes) {
  EXPECT_THAT(message_of<UsageError>([] { models::Vit(models::VitOptions{.patch = 15}); }),
              HasSubstr("224 by 224 can't be cut into patches of 15 by 15"));
  models::Vit vit(models::VitOptions{.image = 16, .patch = 4, .width = 8, .layers = 1, .heads = 2});
  EXPECT_THAT(message_of<UsageError>([&] {
                vit(at::zeros({1, 3, 16, 20}));
              }),
              HasSubstr("images of [1, 3, 16, 20] for a model of images of 16 by 16"));
}

}  // namespace
}  // namespace tessera::testing::vit_test
