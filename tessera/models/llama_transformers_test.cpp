// Decoders with the weights of transformers' models give the same scores, losses, gradients and texts as these models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/models/generate.h"
#include "tessera/models/llama.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::llama_transformers_test {
namespace {

constexpr double kTolerance = 1e-4;

void expect_same(const std::filesystem::path& folder, const Communicator& world) {
  const checkpoint::SafetensorsFile expected(folder / "expected.safetensors");
  const auto expect_close = [&](const at::Tensor& ours, const std::string& name) {
    const auto theirs = expected.read(name);
    ASSERT_EQ(ours.sizes(), theirs.sizes()) << folder << ": " << name;
    EXPECT_LT((ours - theirs).abs().max().item<double>(), kTolerance) << folder << ": " << name;
  };
  const auto config = models::LlamaConfig::read(folder);
  auto model = deferred_init([&] { return models::LlamaForCausalLM(config); });
  auto units = wrap_classes({"LlamaDecoderLayer"});
  if (config.experts) units = wrap_classes({"LlamaDecoderLayer", "LlamaExpert"});
  fully_shard(model, {.mesh = world, .start = Start::Loaded}, units);
  checkpoint::load_weights(model, folder, {.may_be_unknown = model->surplus_names()});
  const auto tokens = expected.read("tokens");
  expect_close(model(tokens).detach(), "logits");
  const auto targets = at::cat({tokens.narrow(1, 1, tokens.size(1) - 1), at::full({tokens.size(0), 1}, -100, at::kLong)}, 1);
  const auto loss = model->loss(tokens, targets, {.rows_at_once = 10});
  expect_close(loss.detach(), "loss");
  loss.backward();
  for (const auto& [name, parameter] : named_parameters(model)) {
    const bool is_used = config.experts ? expected.contains("gradient of " + name) : true;
    ASSERT_EQ(parameter.grad().defined(), is_used) << folder << ": " << name;
    if (is_used) expect_close(full_grad(parameter), "gradient of " + name);
  }
  model->eval();
  const auto length = tokens.size(1);
  const auto positions = at::cat({at::arange(length - 10), at::arange(10)}).unsqueeze(0);  // of two documents
  if (config.model_type != "qwen2_moe")
    expect_close(model(tokens.narrow(0, 0, 1), models::LlamaInput{.positions = positions}).detach(), "packed");
  const auto continued = expected.read("continued");
  const auto ours = models::generate(*model, tokens.narrow(0, 0, 1), {.most = continued.size(1) - tokens.size(1), .ends = {}});
  EXPECT_TRUE(at::equal(ours, continued)) << folder << ours << continued;
}

TEST(LlamaTransformers, ScoresGradientsAndTextsAreTheirs) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/llama_files.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package transformers";
  ASSERT_EQ(written.status, 0) << written.output;
  with_ranks(2, [&](const Communicator& world) {
    for (const auto* name :
         {"llama", "llama5", "linear", "tied", "padded", "tied-padded", "mistral", "qwen2", "qwen3", "smollm3", "partial", "yarn",
          "yarn-whole", "gemma2", "gemma3", "phi3", "phi4", "phi4-long", "mixtral", "qwen2_moe", "qwen3_moe"})
      expect_same(folder / name, world);
  });
}

TEST(Generate, DrawsByTheProbabilitiesOfTransformers) {
  const Folder folder;
  const auto file = folder / "sampling.safetensors";
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/sampling.py", file});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package transformers";
  ASSERT_EQ(written.status, 0) << written.output;
  const checkpoint::SafetensorsFile expected(file);
  const auto scores = expected.read("scores"), texts = expected.read("texts"), settings = expected.read("settings");
  const auto probabilities = expected.read("probabilities");
  for (int64_t i = 0; i < scores.size(0); i++) {
    const auto value = [&](int64_t j) { return settings[i][j].item<double>(); };
    const auto ours = models::probabilities_of(scores[i], texts[i],
                                               {.temperature = value(0),
                                                .top_k = static_cast<int64_t>(value(1)),
                                                .top_p = value(2),
                                                .min_p = value(3),
                                                .repetition_penalty = value(4)});
    EXPECT_TRUE(at::equal(ours > 0, probabilities[i] > 0)) << settings[i];
    EXPECT_LT((ours - probabilities[i]).abs().max().item<double>(), 1e-6) << settings[i];
  }
}

TEST(LlamaTransformers, StepsAreThoseOfFsdp2) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/llama_files.py", "steps", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package transformers";
  ASSERT_EQ(written.status, 0) << written.output;
  const checkpoint::SafetensorsFile expected(folder / "expected.safetensors");
  const auto tokens = checkpoint::SafetensorsFile(folder / "tokens.safetensors").read("tokens");  // {steps, ranks, rows, length}
  const auto losses = expected.read("losses");
  with_ranks(2, [&](const Communicator& world) {
    auto model = deferred_init([&] { return models::LlamaForCausalLM(models::LlamaConfig::read(folder.path())); });
    fully_shard(model, {.mesh = world, .start = Start::Loaded}, wrap_classes({"LlamaDecoderLayer"}));
    checkpoint::load_weights(model, folder.path());
    optim::AdamW optimizer(parameters(model), {.lr = 3e-3, .beta2 = 0.95, .weight_decay = 0.1});
    for (int64_t step = 0; step < tokens.size(0); step++) {
      const auto own = tokens[step][world.rank()];
      const auto targets = at::cat({own.narrow(1, 1, own.size(1) - 1), at::full({own.size(0), 1}, -100, at::kLong)}, 1);
      const auto loss = model->loss(own, targets);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      auto mean = loss.detach().clone();
      world.all_reduce(mean, {.op = Reduce::Mean}).wait();
      EXPECT_NEAR(mean.item<double>(), losses[step].item<double>(), kTolerance) << step;
    }
    for (const auto& [name, parameter] : named_parameters(model)) {
      const auto ours = full_parameter(parameter), theirs = expected.read(name);
      EXPECT_LT(((ours - theirs).norm() / theirs.norm()).item<double>(), 1e-3) << name;
    }
  });
}

}  // namespace
}  // namespace tessera::testing::llama_transformers_test
