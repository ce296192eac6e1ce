// Trains adapters on a Llama of the shape of 8B, drawn part by part, with weights in NF4, on two ranks of one machine. The ranks are
// threads, so the kernel's numbers for the process are those of both ranks together.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <chrono>
#include <fstream>

#include "tessera/llm/units.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/quantize.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/weight_forms.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"

namespace tessera::testing::qlora_long_test {
namespace {

constexpr int64_t kLength = 64;
const models::LlamaConfig kConfig{.vocab_size = 128256,
                                  .hidden_size = 4096,
                                  .intermediate_size = 14336,
                                  .num_hidden_layers = 32,
                                  .num_attention_heads = 32,
                                  .num_key_value_heads = 8};

/// Returns gigabytes of this process as the kernel counts them: VmRSS are those in use now, VmHWM the most that were ever in use.
double gigabytes(const std::string& key) {
  std::ifstream lines("/proc/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key + ":")) return std::stod(line.substr(key.size() + 1)) * 1024 / 1e9;
  }
  return 0;
}

models::LlamaForCausalLM made(const Communicator& world) {
  auto model = deferred_init(
      [] {
        models::LlamaForCausalLM all(kConfig);
        all->to(at::kBFloat16);
        return all;
      },
      {.seed = 7});
  nn::quantize(model);
  lora::apply(model, {.r = 16, .lora_alpha = 32});
  const auto layers = wrap_classes({"LlamaDecoderLayer"});
  activation::checkpoint_modules(*model, layers, {});
  const ShardOptions options{.mesh = world, .start = Start::Equal};
  llm::shard_ends(model, options, llm::Units::Apart);
  fully_shard(model, options, layers);
  return model;
}

TEST(Qlora, TakesStepsOfEightBillionWeights) {
  run_world(
      {.transport = "threads", .ranks = 2},
      [](const Communicator& world) {
        const auto begin = std::chrono::steady_clock::now();
        const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
        auto model = made(world);
        int64_t held = 0, weights = 0, trained = 0;
        for (const auto& [name, shard] : named_parameters(model)) {
          const auto whole = c10::multiply_integers(shard_info(shard)->shape);
          if (shard.scalar_type() == at::kByte) held += whole;
          if (shard.requires_grad()) trained += whole;
        }
        for (const auto& module : model->modules()) {
          if (const auto* linear = module->as<torch::nn::LinearImpl>(); linear != nullptr && held_form(linear->weight) != nullptr)
            weights += linear->weight.numel();
        }
        EXPECT_GT(weights, 6'900'000'000);
        EXPECT_LE(static_cast<double>(held), 0.13 * 4 * static_cast<double>(weights));
        const auto to_make = seconds();
        optim::AdamW optimizer(parameters(*model), {.lr = 1e-3});
        const auto ids = (at::arange(kLength + 1) * 31 + world.rank()).remainder(1000).view({1, -1});
        std::vector<double> losses;
        for (int step = 0; step < 3; step++) {
          const auto loss = model->loss(ids.slice(1, 0, -1), ids.slice(1, 1));
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          losses.push_back(loss.item<double>());
        }
        EXPECT_LT(losses.back(), losses.front());
        world.barrier();
        if (!world.is_first()) return;
        const auto most = gigabytes("VmHWM");
        std::cout << fmt::format(
            "{:.2f} billion weights in {:.2f} GB, {:.1f} million trained; made in {:.0f} s, a step in {:.0f} s, at most {:.1f} GB\n",
            static_cast<double>(weights) / 1e9, static_cast<double>(held) / 1e9, static_cast<double>(trained) / 1e6, to_make,
            (seconds() - to_make) / 3, most);
        EXPECT_LT(most, 16);  // in bfloat16 the weights alone are 16
      },
      std::chrono::minutes(20));
}

}  // namespace
}  // namespace tessera::testing::qlora_long_test
