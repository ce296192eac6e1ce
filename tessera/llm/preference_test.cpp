// Pairs become rows, and their losses are the formulas of DPO and ORPO.
#include "tessera/llm/preference.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/llm/packing.h"
#include "tests/testing/folder.h"

namespace tessera::testing::preference_test {
namespace {

using llm::only_read;
using llm::Preference;
using ::testing::HasSubstr;

llm::TokenFile file_of(const std::filesystem::path& path, const std::vector<std::vector<int32_t>>& documents, const char* pairs = "1") {
  std::vector<int32_t> tokens;
  std::vector<int64_t> ends;
  for (const auto& document : documents) {
    tokens.insert(tokens.end(), document.begin(), document.end());
    ends.push_back(std::ssize(tokens));
  }
  checkpoint::SafetensorsWriter writer(path,
                                       {{.name = "ends", .dtype = at::kLong, .sizes = {std::ssize(ends)}},
                                        {.name = "tokens", .dtype = at::kInt, .sizes = {std::ssize(tokens)}}},
                                       {{"format", "tessera tokens"}, {"vocabulary", "50"}, {"pairs", pairs}});
  writer.write(at::tensor(ends, at::kLong));
  writer.write(at::tensor(tokens, at::kInt));
  writer.close();
  return llm::TokenFile(path);
}

const std::vector<std::vector<int32_t>> kDocuments = {{only_read(1), only_read(2), 3, 4},  {only_read(1), only_read(2), 5},
                                                      {only_read(6), only_read(7), only_read(8), only_read(9), only_read(10), 11}, {only_read(6), 12},
                                                      {only_read(13), 14},                 {only_read(13), 15, 16, 17, 18, 19}};

TEST(PairRows, AreTwoDocumentsEach) {
  const Folder folder;
  const auto file = file_of(folder / "p", kDocuments);
  EXPECT_TRUE(file.has_pairs());
  const llm::PairRows rows(file, 5);
  ASSERT_EQ(rows.size(), 2);  // of the second pair, the chosen answer begins after five tokens
  EXPECT_EQ(rows.left_out(), 1);
  const std::vector<int64_t> numbers = {1, 0};
  const llm::PairBatch batch(rows(numbers));
  const auto expect_row = [](const at::Tensor& values, std::vector<int64_t> expected) {
    EXPECT_TRUE(at::equal(values, at::tensor(expected, at::kLong))) << values;
  };
  expect_row(batch.numbers, {1, 0});
  expect_row(batch.tokens[0][1], {13, 15, 16, 17, 18});
  expect_row(batch.next[0][1], {15, 16, 17, 18, -100});
  expect_row(batch.tokens[1][0], {1, 2, 3, 4, 0});
  expect_row(batch.next[1][0], {2, 3, 4, -100, -100});
  expect_row(batch.targets[1][0], {-100, 3, 4, -100, -100});
  expect_row(batch.in_documents()[1][0].to(at::kLong), {1, 1, 1, 1, 0});
  EXPECT_EQ(llm::PairRows(file, 1000)(numbers).targets.size(2), 64);
  EXPECT_THAT(message_of<ConfigError>([&] { llm::PairRows(file_of(folder / "none", {kDocuments[2], kDocuments[2]}), 5); }),
              HasSubstr("no pair has two answers that begin within 5 tokens"));
  EXPECT_THAT(message_of<IoError>([&] { file_of(folder / "odd", {kDocuments[0]}); }), HasSubstr("it has pairs, but 1 documents"));
  EXPECT_THAT(message_of<ConfigError>([&] { llm::PairRows(file_of(folder / "texts", kDocuments, "0"), 5); }), HasSubstr("has texts, not pairs"));
}

TEST(Preference, HasTheFormulasOfDpoAndOrpo) {
  const Folder folder;
  const llm::PairRows rows(file_of(folder / "p", kDocuments), 6);
  const std::vector<int64_t> numbers = {0, 2, 1};
  auto samples = rows(numbers);
  samples.targets[2].fill_(llm::kIgnored);  // as the loader does with a pair that fills a batch
  const llm::PairBatch batch(samples);
  torch::manual_seed(1);
  auto losses = (at::rand({3, 2, 6}, at::kDouble) * 3).requires_grad_();
  const auto reference = -at::rand({3, 2}, at::kDouble) * 5;
  const auto c0 = -(losses[0][0][1] + losses[0][0][2]), r0 = -losses[0][1][1], c1 = -losses[1][0][0], r1 = -losses[1][1].narrow(0, 0, 5).sum();
  const auto expect_sums = [&](const Preference& preference, const at::Tensor& loss, const at::Tensor& text, std::vector<at::Tensor> rewards) {
    const auto sums = llm::pair_sums(losses, batch, preference, reference);
    const auto near = [](const at::Tensor& one, const at::Tensor& other) { return at::allclose(one, other, 1e-12, 1e-12); };
    EXPECT_TRUE(near(sums.loss, loss) && near(sums.text_loss, text));
    EXPECT_EQ(sums.pairs.item<int>(), 2);
    EXPECT_TRUE(near(sums.chosen, rewards[0] + rewards[2]) && near(sums.rejected, rewards[1] + rewards[3]));
    EXPECT_EQ(sums.accurate.item<int>(), (rewards[0] > rewards[1]).item<int>() + (rewards[2] > rewards[3]).item<int>());
    EXPECT_TRUE(near(torch::autograd::grad({sums.loss + sums.text_loss}, {losses})[0], torch::autograd::grad({loss + text}, {losses})[0]));
    return sums;
  };
  const auto of = [&](int64_t row, int64_t side) { return reference[row][side]; };
  const auto dpo = -at::log_sigmoid(0.3 * ((c0 - of(0, 0)) - (r0 - of(0, 1)))) - at::log_sigmoid(0.3 * ((c1 - of(2, 0)) - (r1 - of(2, 1))));
  expect_sums({.kind = Preference::Kind::Dpo, .beta = 0.3}, dpo, at::zeros_like(losses).sum() + 0 * c0,
              {0.3 * (c0 - of(0, 0)), 0.3 * (r0 - of(0, 1)), 0.3 * (c1 - of(2, 0)), 0.3 * (r1 - of(2, 1))});
  const auto odds = [](const at::Tensor& log_mean) { return log_mean - (1 - log_mean.exp()).log(); };
  const auto orpo = -0.3 * (at::log_sigmoid(odds(c0 / 2) - odds(r0)) + at::log_sigmoid(odds(c1) - odds(r1 / 5)));
  const auto sums = expect_sums({.kind = Preference::Kind::Orpo, .beta = 0.3}, orpo, losses[0][0].narrow(0, 0, 3).sum() + losses[1][0][0],
                                {0.3 * c0 / 2, 0.3 * r0, 0.3 * c1, 0.3 * r1 / 5});
  EXPECT_EQ(sums.tokens.item<int>(), 4);
}

}  // namespace
}  // namespace tessera::testing::preference_test
