// Every model recomputes its activations if a configuration says so, for any choice of modules, and gets the same bits.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <mutex>

#include "tessera/models/bert.h"
#include "tessera/models/gpt.h"
#include "tessera/models/mlp.h"
#include "tessera/models/mnist.h"
#include "tessera/models/resnet.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/trained.h"

namespace tessera::testing::checkpointing_test {
namespace {

using Settings = std::map<std::string, std::string>;

thread_local int operators = 0;

/// Counts operators of this thread, as long as it exists.
class Count {
 public:
  Count() {
    operators = 0;
    const auto note = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
      operators++;
      return nullptr;
    };
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}));
  }
  Count(const Count&) = delete;
  Count& operator=(const Count&) = delete;
  ~Count() { at::removeCallback(handle_); }

 private:
  at::CallbackHandle handle_;
};

struct Outcome {
  std::vector<at::Tensor> tensors;
  int operators = 0;  // of rank 0
};

/// Takes two steps on two ranks. Returns the losses, and the whole values at the end.
template <class Model>
Outcome train(const std::function<Model()>& make, const Settings& settings, const at::Tensor& inputs) {
  torch::manual_seed(5);
  std::array models = {make(), make()};  // here, because the ranks share one random generator
  Outcome outcome;
  with_ranks(2, [&](const Communicator& world) {
    auto& model = models.at(static_cast<size_t>(world.rank()));
    Trainer trainer(options_for(world, settings));
    trainer.prepare(model);
    optim::SGD optimizer(parameters(*model), {.lr = 0.01, .momentum = 0.9});
    trainer.prepare(optimizer);
    const Count count;
    std::vector<at::Tensor> tensors;
    for (int step = 0; step < 2; step++) {
      const auto accumulation = trainer.accumulate();
      const auto batch = at::isIntegralType(inputs.scalar_type(), false) ? inputs + world.rank() : inputs * (1 + world.rank());
      const auto loss = call(model, batch).to(at::kFloat).pow(2).mean();
      trainer.backward(loss);
      trainer.step();
      tensors.push_back(loss.detach());
    }
    const auto seen = operators;
    for (const auto& value : whole_values(*model)) tensors.push_back(value);
    if (world.is_first()) outcome = {.tensors = tensors, .operators = seen};
  });
  return outcome;
}

Settings units_of(const std::string& classes) {
  return {{"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"}, {"fsdp_transformer_layer_cls_to_wrap", classes}};
}

/// Returns settings with units of these classes, of all large modules, and of the whole model; and the first again in lower precision.
std::vector<Settings> policies(const std::string& classes) {
  auto narrow = units_of(classes);
  narrow["mixed_precision"] = "bf16";
  return {units_of(classes),
          {{"fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"}, {"fsdp_min_num_params", "100"}},
          {{"fsdp_auto_wrap_policy", "NO_WRAP"}},
          narrow};
}

template <class Model>
void expect_same_bits(const std::function<Model()>& make, std::vector<Settings> policies, const at::Tensor& inputs) {
  for (auto& settings : policies) {
    SCOPED_TRACE(::testing::PrintToString(settings));
    const auto kept = train(make, settings, inputs);
    settings["fsdp_activation_checkpointing"] = "true";
    const auto again = train(make, settings, inputs);
    expect_same(again.tensors, kept.tensors);
    EXPECT_GT(again.operators, kept.operators);
  }
}

TEST(ModelsWithCheckpointing, Gpt) {
  const models::GptOptions options{.vocabulary = 16, .width = 16, .layers = 2, .heads = 2, .longest = 8};
  expect_same_bits<models::Gpt>([&] { return models::Gpt(options); }, policies("GptBlock"), at::arange(12).view({2, 6}));
}

TEST(ModelsWithCheckpointing, ResNet) {
  const auto images = at::arange(2 * 3 * 40 * 40, at::kFloat).sin().view({2, 3, 40, 40});
  expect_same_bits<models::ResNet>([] { return models::ResNet(models::ResNetOptions::resnet50(10)); }, {units_of("Bottleneck")}, images);
}

TEST(ModelsWithCheckpointing, Bert) {
  const models::BertConfig config{.vocab_size = 30,
                                  .hidden_size = 16,
                                  .num_hidden_layers = 2,
                                  .num_attention_heads = 2,
                                  .intermediate_size = 32,
                                  .max_position_embeddings = 10,
                                  .hidden_dropout_prob = 0,
                                  .attention_probs_dropout_prob = 0};
  expect_same_bits<models::BertForSequenceClassification>([&] { return models::BertForSequenceClassification(config); },
                                                          policies("BertLayer"), at::arange(12).view({2, 6}));
}

TEST(ModelsWithCheckpointing, Mlp) {
  expect_same_bits<models::Mlp>([] { return models::Mlp(models::MlpOptions{.width = 16, .layers = 3, .classes = 4}); }, policies("Linear"),
                                at::arange(32, at::kFloat).sin().view({2, 16}));
}

TEST(ModelsWithCheckpointing, MnistNet) {
  expect_same_bits<models::MnistNet>([] { return models::MnistNet(); }, policies("Conv2d,Linear"),
                                     at::arange(2 * 28 * 28, at::kFloat).sin().view({2, 1, 28, 28}));
}

}  // namespace
}  // namespace tessera::testing::checkpointing_test
