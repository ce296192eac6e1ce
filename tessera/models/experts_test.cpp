// Models with experts train sharded as they do whole, where ranks need different experts: an expert may be used by some ranks or by none.
#include "tessera/models/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/models/generate.h"
#include "tessera/models/llama.h"
#include "tessera/nn/lora.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"
#include "tests/testing/small_llama.h"

namespace tessera::testing::experts_test {
namespace {

using models::LlamaForCausalLM;

/// Adds `adapt(model)` to what is drawn.
LlamaForCausalLM seeded_experts(const std::string& type, const std::function<void(LlamaForCausalLM&)>& adapt = {}) {
  static std::mutex generator;
  std::lock_guard lock(generator);
  torch::manual_seed(6);
  auto config = small_config(type);
  config.experts->output_router_logits = type == "mixtral";
  config.experts->num_experts = 12;
  LlamaForCausalLM model(config);
  if (adapt) adapt(model);
  return model;
}

/// Two tokens, so that a rank uses at most four of a layer's twelve experts.
at::Tensor loss_of_two(LlamaForCausalLM& model, int rank, int pass = 0) {
  const auto tokens = at::tensor({3 + 7 * rank + 50 * pass, 10 + 31 * rank}, at::kLong).unsqueeze(0);
  return model->loss(tokens, tokens + 1);
}

/// Compares gradients, which an expert that no rank has used has not.
void expect_gradients(LlamaForCausalLM& model, LlamaForCausalLM& whole) {
  const auto expected = whole->named_parameters();
  int64_t unused = 0;
  for (const auto& [name, parameter] : named_parameters(model)) {
    if (!parameter.requires_grad()) continue;
    const auto& gradient = expected[name].grad();
    ASSERT_EQ(parameter.grad().defined(), gradient.defined()) << name;
    unused += gradient.defined() ? 0 : 1;
    if (!gradient.defined()) continue;
    EXPECT_TRUE(at::allclose(full_grad(parameter), gradient, 1e-4, 1e-6)) << name;
  }
  EXPECT_GT(unused, 0);
}

struct HowWrapped {
  std::vector<std::string> classes = {"LlamaDecoderLayer", "LlamaExpert"};
  int64_t merge_below = 0;
  bool again = false;  // whether activations are computed again
};

LlamaForCausalLM sharded_experts(const Communicator& world, const std::string& type, Residence residence, const HowWrapped& how = {}) {
  auto model = seeded_experts(type);
  if (how.again) activation::checkpoint_modules(*model, wrap_classes({"LlamaDecoderLayer"}));
  auto policy = wrap_classes(how.classes);
  policy.merge_below = how.merge_below;
  fully_shard(model, {.mesh = world, .residence = residence}, policy);
  return model;
}

TEST(Experts, MayBeUsedBySomeRanksOrNone) {
  const HowWrapped with_layer{.classes = {"LlamaDecoderLayer"}};
  for (const auto& how : {HowWrapped{}, HowWrapped{.merge_below = 45'000}, with_layer, HowWrapped{.again = true}}) {
    for (const auto residence : residences()) {
      for (const int ranks : {2, 3}) {
        with_ranks(ranks, [&](const Communicator& world) {
          const auto* type = ranks == 2 ? "mixtral" : "qwen2_moe";
          auto whole = seeded_experts(type), model = sharded_experts(world, type, residence, how);
          optim::SGD optimizer(parameters(model), {.lr = 0.1, .weight_decay = 0.1});
          optim::SGD expected(whole->parameters(), {.lr = 0.1, .weight_decay = 0.1});
          for (int pass = 0; pass < 3; pass++) {
            const auto loss = mean_over_ranks(world, [&](int rank) { return loss_of_two(whole, rank, pass); });
            loss.backward();
            loss_of_two(model, world.rank(), pass).backward();
            expect_gradients(model, whole);
            for (auto* each : {&optimizer, &expected}) {
              each->step();
              each->zero_grad();
            }
          }
          const auto values = whole->named_parameters();
          for (const auto& [name, parameter] : named_parameters(model))
            EXPECT_TRUE(at::allclose(full_parameter(parameter), values[name], 1e-3, 1e-5)) << name;
        });
      }
    }
  }
}

TEST(Experts, OfEarlierPassesAreReducedByTheLast) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      auto whole = seeded_experts("qwen3_moe"), model = sharded_experts(world, "qwen3_moe", residence);
      for (int pass = 0; pass < 3; pass++) {
        std::optional<NoSync> guard;
        if (pass < 2) guard.emplace(no_sync(*model));
        mean_over_ranks(world, [&](int rank) { return loss_of_two(whole, rank, pass); }).backward();
        loss_of_two(model, world.rank(), pass).backward();
      }
      expect_gradients(model, whole);
      optim::SGD(parameters(model), {.lr = 0.1}).step();  // no gradient is left unreduced
    });
  }
}

TEST(Experts, AreGatheredOnlyIfTokensNeedThem) {
  with_ranks(2, [](const Communicator& world) {
    auto whole = seeded_experts("mixtral"), model = sharded_experts(world, "mixtral", Residence::Gathered);
    const auto prompt = at::tensor({5}, at::kLong).unsqueeze(0);
    const auto expected = models::generate(*whole, prompt, {.most = 4});
    reset_counters(model);
    EXPECT_TRUE(at::equal(models::generate(*model, prompt, {.most = 4}), expected));
    // For each token, in each of two layers: the layer and two experts, and a prefetch in vain.
    EXPECT_LE(counters(model).gathers, 4 * 2 * 4 + 10);
  });
}

TEST(Experts, InSharedMemoryNeedNoOtherRankToEvaluate) {
  with_ranks(2, [](const Communicator& world) {
    auto whole = seeded_experts("mixtral"), model = sharded_experts(world, "mixtral", Residence::NodeShared);
    loss_of_two(model, world.rank()).backward();
    model->zero_grad();
    const torch::NoGradGuard no_grad;
    if (world.rank() == 0) return;
    EXPECT_TRUE(at::allclose(loss_of_two(model, 0, 2), loss_of_two(whole, 0, 2)));
  });
}

TEST(Experts, AreBalancedByTheTokensThatCount) {
  const models::ExpertOptions options{.num_experts = 4};
  const auto counted = at::tensor({1, 0, 1, 1, 0}).to(at::kBool), rows = counted.nonzero().squeeze(1);
  const std::vector<at::Tensor> scores = {at::randn({5, 4}), {}, at::randn({5, 4})};
  const std::vector<at::Tensor> some = {scores[0].index_select(0, rows), scores[2].index_select(0, rows)};
  EXPECT_TRUE(at::allclose(models::balance_loss(scores, options, counted), models::balance_loss(some, options)));
  // The loss of a row does not depend on the padding behind it.
  auto model = seeded_experts("mixtral");
  const auto row = at::arange(3, 7).unsqueeze(0), padded = at::constant_pad_nd(row, {0, 5});
  const auto loss = model->loss(row, row), with_padding = model->loss(
      padded, at::constant_pad_nd(row, {0, 5}, -100), {},
      {.positions = at::cat({at::arange(4), at::arange(5)}).unsqueeze(0), .counted = at::constant_pad_nd(at::ones_like(row), {0, 5})});
  EXPECT_NEAR(with_padding.item<double>(), loss.item<double>(), 1e-5);
}

TEST(Experts, MayHaveAdapters) {
  with_ranks(2, [](const Communicator& world) {
    const auto adapt = [](LlamaForCausalLM& model) {
      lora::apply(model, {.r = 1});
      const torch::NoGradGuard no_grad;
      for (const auto& item : model->named_parameters()) {
        if (item.key().find("lora_B") != std::string::npos) item.value().normal_(0, 0.1);
      }
    };
    auto whole = seeded_experts("qwen2_moe", adapt), model = seeded_experts("qwen2_moe", adapt);
    fully_shard(model, {.mesh = world}, wrap_classes({"LlamaDecoderLayer", "LlamaExpert"}));
    mean_over_ranks(world, [&](int rank) { return loss_of_two(whole, rank); }).backward();
    loss_of_two(model, world.rank()).backward();
    expect_gradients(model, whole);
    EXPECT_TRUE(whole->named_parameters().contains("model.layers.1.mlp.experts.11.up_proj.lora_A.default.weight"));
  });
}

}  // namespace
}  // namespace tessera::testing::experts_test
