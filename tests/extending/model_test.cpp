// The model of one's own trains sharded with the same bits as replicated.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gated_mlp.h"
#include "tests/testing/parity.h"

namespace tessera::testing::extending_model_test {
namespace {

struct TrainedMlp : TrainedModel {
  own::GatedMlp mlp = register_module("mlp", own::GatedMlp(own::GatedMlpOptions{.width = 8, .layers = 3, .classes = 4}));
  at::Tensor loss(at::Generator& batches) override { return mlp(torch::randn({3, 8}, batches)).pow(2).mean(); }
};

TEST(OwnModel, TrainsShardedAsReplicated) {
  for (const int ranks : {1, 2, 3}) {
    expect_parity(
        ranks, [] { return std::make_shared<TrainedMlp>(); },
        [](auto parameters) { return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01)); }, /*steps=*/4,
        [](const auto& model, const Communicator& world) { fully_shard(*model, {.mesh = world}, wrap_classes({"GatedBlock"})); });
  }
}

}  // namespace
}  // namespace tessera::testing::extending_model_test
