// Ten steps with LoRA, DoRA, QLoRA and QDoRA adapters give the results of Python's PEFT, transformers and bitsandbytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/models/llama.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/quantize.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::adapters_test {
namespace {

// The two implementations round in different places, and Adam makes full steps from gradients near 0.
constexpr double kNarrowLoss = 5e-3, kNarrowAdapter = 0.1;

void expect_steps(const Folder& folder, const std::string& method, Residence residence, const Communicator& world) {
  const std::string start = folder / (method + "-start"), end = folder / (method + "-end");
  const checkpoint::SafetensorsFile expected(folder / "steps.safetensors");
  const bool is_narrow = method.ends_with("-bf16");
  auto model = deferred_init([&] {
    models::LlamaForCausalLM whole(models::LlamaConfig::read(folder.path()));
    if (is_narrow) whole->to(at::kBFloat16);
    return whole;
  });
  if (method.starts_with("q")) nn::quantize(model);
  lora::apply(model, checkpoint::read_adapter_config(start));
  fully_shard(model, {.mesh = world, .start = Start::Loaded, .residence = residence}, wrap_classes({"LlamaDecoderLayer"}));
  checkpoint::load_weights(model, folder.path(), {.may_be_missing = {".*\\.lora_.*"}});
  checkpoint::load_adapter(model, start);
  optim::AdamW optimizer(parameters(model), {.lr = 1e-2, .weight_decay = 0});
  const auto tokens = expected.read("tokens"), losses = expected.read(method);  // {steps, rows, length}, {steps}
  for (int64_t step = 0; step < tokens.size(0); step++) {
    const auto own = tokens[step].chunk(world.size())[static_cast<size_t>(world.rank())];
    const auto targets = at::cat({own.narrow(1, 1, own.size(1) - 1), at::full({own.size(0), 1}, -100, at::kLong)}, 1);
    const auto loss = model->loss(own, targets);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    auto mean = loss.detach().clone();
    world.all_reduce(mean, {.op = Reduce::Mean}).wait();
    EXPECT_NEAR(mean.item<double>(), losses[step].item<double>(), is_narrow ? kNarrowLoss : 1e-4) << method << " " << step;
  }
  const std::string saved = folder / (method + "-here");
  checkpoint::save_adapter(model, saved, world);
  if (!world.is_first()) return;
  const checkpoint::SafetensorsFile ours(saved + "/adapter_model.safetensors"), theirs(end + "/adapter_model.safetensors");
  EXPECT_THAT(ours.names(), ::testing::UnorderedElementsAreArray(theirs.names()));
  for (const auto& name : theirs.names())
    EXPECT_LT(((ours.read(name) - theirs.read(name)).norm() / theirs.read(name).norm()).item<double>(), is_narrow ? kNarrowAdapter : 1e-3)
        << method << " " << name;
}

TEST(Adapters, TakeTheStepsOfPeft) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/adapter_steps.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no packages peft and bitsandbytes";
  ASSERT_EQ(written.status, 0) << written.output;
  for (const auto* method : {"lora", "dora", "qlora", "qdora", "lora-bf16", "dora-bf16", "qlora-bf16"}) {
    for (const int ranks : {2, 3}) {
      for (const auto residence : residences()) {
        with_ranks(ranks, [&](const Communicator& world) { expect_steps(folder, method, residence, world); });
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing::adapters_test
