// Networks for images have the names, shapes, results and initial weights of torchvision's and timm's.
#include "tessera/models/image_model.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/format.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/models/vgg.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::image_model_test {
namespace {

using checkpoint::SafetensorsFile;
using models::make_image_model;
using ::testing::HasSubstr;

Ended write_expected(const std::string& what, const Folder& folder) {
  return run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/image_model_files.py", what, folder.path()});
}

std::map<std::string, at::Tensor> state_of(const torch::nn::Module& model) {
  std::map<std::string, at::Tensor> state;
  for (const auto& item : model.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : model.named_buffers()) state[item.key()] = item.value();
  return state;
}

/// As in image_model_files.py: values are too many for files.
void fill(const std::map<std::string, at::Tensor>& state) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(7);
  for (const auto& [name, tensor] : state) {
    if (!tensor.is_floating_point()) {
      tensor.zero_();
    } else if (tensor.dim() > 1) {
      const auto bound = std::sqrt(static_cast<double>(3 * tensor.size(0)) / static_cast<double>(tensor.numel()));
      tensor.uniform_(-bound, bound);
    } else {
      tensor.uniform_(-0.2, 0.2);
      if (name.ends_with("weight") || name.ends_with("running_var")) tensor.add_(1);
    }
  }
}

at::Tensor samples(const at::Tensor& tensor) {
  return tensor.detach().flatten().slice(0, 0, {}, std::max<int64_t>(1, tensor.numel() / 100));
}

/// Gradients of biases before a batch norm are sums that vanish but for rounding.
void expect_close(const at::Tensor& ours, const SafetensorsFile& expected, const std::string& name) {
  const auto theirs = expected.read(name);
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << name;
  const auto tolerance = ours.scalar_type() == at::kFloat ? 1e-2 : 1e-6;
  const auto distance = (ours - theirs).to(at::kDouble).norm().item<double>();
  EXPECT_LT(distance, tolerance * (theirs.to(at::kDouble).norm().item<double>() + 1e-3)) << name;
}

at::Tensor loss_of(models::ImageModel& model, const at::Tensor& images) {
  return at::cross_entropy_loss(model.forward(images), at::arange(images.size(0)));
}

TEST(ImageModels, HaveTheNamesAndShapesOfTorchvisionAndTimm) {
  const Folder folder;
  const auto written = write_expected("names", folder);
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package torchvision or timm";
  ASSERT_EQ(written.status, 0) << written.output;
  std::map<std::string, std::set<std::string>> expected;
  std::ifstream file(folder / "expected.txt");
  std::string model, tensor, sizes;
  while (file >> model >> tensor && std::getline(file, sizes)) {
    for (const auto& [pattern, replacement] : models::renames_of(model))
      tensor = std::regex_replace(tensor, std::regex(pattern), replacement);
    expected[model].insert(tensor + sizes);
  }
  EXPECT_EQ(expected.size(), models::image_model_names().size() - 2);  // torchvision and timm have no vit_10b and no vit_60b
  for (const auto& each : expected) {
    const auto& name = each.first;
    std::set<std::string> ours;
    const auto made = deferred_init([&] { return make_image_model(name); }, {.seed = 1});
    for (const auto& [key, value] : state_of(*made)) ours.insert(key + " " + joined(value.sizes()));
    EXPECT_EQ(ours, each.second) << name;
    const auto& network = models::image_network(name);
    EXPECT_EQ(network.image, name == "inception_v3" ? 299 : 224);
    EXPECT_TRUE(each.second.contains(network.head + ".bias 1000")) << name;
    const auto is_block = [&](const auto& module) { return module->name().find(network.blocks) != std::string::npos; };
    EXPECT_TRUE(std::ranges::any_of(made->modules(), is_block)) << name;
  }
}

TEST(ImageModels, HaveThePixelsOfPublishedWeights) {
  for (const std::string name : {"inception_v3", "vit_tiny_patch16_224", "vit_10b"}) {
    const auto scale = models::pixel_scale_of(name);
    EXPECT_THAT(scale.mean, ::testing::Each(0.5)) << name;
    EXPECT_THAT(scale.deviation, ::testing::Each(0.5)) << name;
  }
  for (const std::string name : {"resnet50", "vit_b_16"}) EXPECT_EQ(models::pixel_scale_of(name).mean[0], 0.485) << name;
  EXPECT_THROW(models::pixel_scale_of("dog"), UsageError);
}

/// Returns how many networks have been compared.
int compare_scores(const SafetensorsFile& expected) {
  int compared = 0;
  for (const auto& name : models::image_model_names()) {
    if (!expected.contains(name + " images")) continue;
    compared++;
    const auto images = expected.read(name + " images");
    const models::ImageModelOptions options{.classes = 10, .image = images.size(3), .dropout = 0};
    const auto model = deferred_init([&] { return make_image_model(name, options); }, {.seed = 1});
    materialize(*model, [](const std::string&, at::Tensor&) {});  // which draws nothing
    for (auto& [key, value] : state_of(*model)) {  // Module::to() would make floats of the counts, too
      if (value.is_floating_point()) value.set_data(value.to(images.scalar_type()));
    }
    fill(state_of(*model));
    model->eval();
    {
      const torch::NoGradGuard no_grad;
      EXPECT_LT((model->forward(images) - expected.read(name + " scores")).abs().max().item<double>(), 1e-4) << name;
    }
    if (!expected.contains(name + " loss")) continue;
    model->train();
    const auto loss = loss_of(*model, images);
    loss.backward();
    expect_close(loss.detach(), expected, name + " loss");
    for (const auto& item : model->named_parameters()) expect_close(samples(item->grad()), expected, name + " gradient of " + item.key());
    for (const auto& item : model->named_buffers()) expect_close(samples(item.value()), expected, name + " " + item.key());
  }
  return compared;
}

TEST(ImageModels, HaveTheScoresAndGradientsOfTorchvisionAndTimm) {
  const Folder folder;
  const auto written = write_expected("scores", folder);
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package torchvision or timm";
  ASSERT_EQ(written.status, 0) << written.output;
  const SafetensorsFile expected(folder / "expected.safetensors");
  EXPECT_EQ(compare_scores(expected), 6);
  with_ranks(2, [&](const Communicator& world) {
    const std::string name = "resnet18";
    const auto model = deferred_init([&] { return make_image_model(name, {.classes = 10}); });
    fully_shard(model, {.mesh = world, .start = Start::Loaded}, wrap_classes({"BasicBlock"}));
    checkpoint::load_weights(model, folder / "resnet18.pth", {.renamed = models::renames_of(name)});
    const auto loss = loss_of(*model, expected.read(name + " images").to(at::kFloat));
    loss.backward();
    expect_close(loss.detach(), expected, name + " loss");
    for (const auto& [parameter, value] : named_parameters(*model))
      expect_close(samples(full_grad(value)), expected, name + " gradient of " + parameter);
  });
}

TEST(ImageModels, LargeOnesHaveTheScoresAndGradientsOfTorchvision) {
  const Folder folder;
  const auto written = write_expected("large", folder);
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package torchvision or timm";
  ASSERT_EQ(written.status, 0) << written.output;
  EXPECT_EQ(compare_scores(SafetensorsFile(folder / "expected.safetensors")), 2);
}

TEST(ImageModels, HaveTheInitialWeightsOfTorchvisionAndTimm) {
  const Folder folder;
  const auto written = write_expected("initial", folder);
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package torchvision or timm";
  ASSERT_EQ(written.status, 0) << written.output;
  const SafetensorsFile expected(folder / "expected.safetensors");
  for (const std::string name : {"alexnet", "resnet18", "squeezenet1_1", "densenet121", "inception_v3", "vit_tiny_patch16_224"}) {
    torch::manual_seed(3);
    const auto model = make_image_model(name);
    const bool same =
        name == "alexnet" || name == "resnet18" || name == "squeezenet1_1";  // the draws, and not only how they are distributed
    for (const auto& item : model->named_parameters()) {
      const auto value = item->detach().to(at::kDouble);
      const auto theirs = expected.read(name + " " + item.key());
      const auto mean = theirs[0].item<double>(), deviation = theirs[1].item<double>();
      const auto known = static_cast<double>(same ? 1e13 : value.numel());
      if (deviation > 0 && known < 4000) continue;
      EXPECT_NEAR(value.mean().item<double>(), mean, 6 * deviation / std::sqrt(known)) << name << ": " << item.key();
      EXPECT_NEAR(value.std(/*unbiased=*/false).item<double>(), deviation, 6 * deviation / std::sqrt(known)) << name << ": " << item.key();
    }
  }
}

TEST(ImageModels, AVggStartsAsItsPaperSays) {
  const auto vgg = deferred_init([] { return models::Vgg(models::VggOptions::vgg11()); }, {.seed = 1});
  materialize(vgg->features);
  const auto last = vgg->classifier->ptr(6);
  materialize(*last);
  const auto expect_drawn = [](const torch::nn::Module& layer, double deviation) {
    EXPECT_NEAR(layer.named_parameters()["weight"].std().item<double>(), deviation, 0.05 * deviation);
    EXPECT_EQ(layer.named_parameters()["bias"].abs().max().item<double>(), 0);
  };
  expect_drawn(*vgg->features->ptr(3), std::sqrt(2.0 / (9 * 128)));
  expect_drawn(*vgg->features->ptr(18), std::sqrt(2.0 / (9 * 512)));
  expect_drawn(*last, 0.01);
}

TEST(ImageModels, TakeImagesFromTheSmallestSizeOn) {
  const torch::NoGradGuard no_grad;
  for (const std::string name : {"alexnet", "densenet121", "inception_v3", "resnet18", "squeezenet1_0", "squeezenet1_1", "vgg11"}) {
    const auto size = models::image_network(name).smallest;
    const auto model = deferred_init([&] { return make_image_model(name, {.classes = 2, .image = size}); }, {.seed = 1});
    materialize(*model, [](const std::string&, at::Tensor&) {});  // which draws nothing
    model->eval();
    EXPECT_EQ(model->forward(at::ones({1, 3, size, size})).size(1), 2) << name;
    if (size == 1) continue;
    EXPECT_ANY_THROW(model->forward(at::ones({1, 3, size - 1, size - 1}))) << name;
    EXPECT_THAT(message_of<UsageError>([&] { make_image_model(name, {.image = size - 1}); }),
                HasSubstr(fmt::format("{0} takes images of at least {1} by {1}", name, size)));
  }
  EXPECT_EQ(models::image_network("vit_huge_patch14_224").smallest, 14);
}

TEST(ImageModels, AnUnknownNameOrAnOptionOfOthersIsAnError) {
  EXPECT_THAT(message_of<UsageError>([] { make_image_model("resnet_50"); }),
              ::testing::AllOf(HasSubstr("there is no network 'resnet_50' (did you mean resnet50?); there are alexnet, densenet121, "),
                               HasSubstr("vit_giant_patch14_224, vit_10b, vit_60b")));
  EXPECT_THAT(message_of<UsageError>([] { models::image_network("dog"); }), HasSubstr("there is no network 'dog'; there are alexnet, "));
  EXPECT_THAT(message_of<UsageError>([] { make_image_model("resnet50", {.dropout = 0.5}); }), HasSubstr("resnet50 has no dropout"));
}

}  // namespace
}  // namespace tessera::testing::image_model_test
