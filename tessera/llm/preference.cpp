#include "tessera/llm/preference.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/llm/packing.h"

namespace tessera::llm {
namespace {

constexpr int64_t kStep = 64;  // of lengths, so that devices see few shapes

at::Tensor log_of_rest(const at::Tensor& log_probability) {
  return log_probability.expm1().neg().log();
}

}  // namespace

PairRows::PairRows(TokenFile file, int64_t length) : file_(std::move(file)), length_(length) {
  if (!file_.has_pairs()) throw ConfigError("{} has texts, not pairs", file_.path());
  const auto teaches = [&](int64_t number) { return std::ranges::any_of(document(number).subspan(1), std::not_fn(is_only_read)); };
  for (int64_t i = 0; i < std::ssize(file_.ends()) / 2; i++) {
    if (teaches(2 * i) && teaches(2 * i + 1)) pairs_.push_back(i);
  }
  if (pairs_.empty()) throw ConfigError("{}: no pair has two answers that begin within {} tokens; take longer rows", file_.path(), length);
}

std::string PairRows::data() const {
  return file_.checksum().empty() ? std::string() : fmt::format("pairs {} of up to {} tokens", file_.checksum(), length_);
}

std::span<const int32_t> PairRows::document(int64_t number) const {
  const auto begin = number == 0 ? 0 : file_.ends()[static_cast<size_t>(number) - 1];
  const auto size = std::min(file_.ends()[static_cast<size_t>(number)] - begin, length_);
  return file_.tokens().subspan(static_cast<size_t>(begin), static_cast<size_t>(size));
}

data::Samples PairRows::operator()(std::span<const int64_t> numbers) const {
  std::vector<std::span<const int32_t>> documents;
  int64_t longest = 0;
  for (const auto number : numbers) {
    for (const int64_t side : {0, 1}) {
      documents.push_back(document(2 * pairs_.at(static_cast<size_t>(number)) + side));
      longest = std::max(longest, std::ssize(documents.back()));
    }
  }
  longest = std::min((longest + kStep - 1) / kStep * kStep, length_);
  const auto pairs = std::ssize(numbers);
  data::Samples samples{.inputs = at::zeros({pairs, 2, 3, longest}, at::kLong), .targets = at::full({pairs, 2, longest}, kIgnored, at::kLong)};
  auto *inputs = samples.inputs.mutable_data_ptr<int64_t>(), *targets = samples.targets.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < documents.size(); i++, inputs += 3 * longest, targets += longest) {
    auto *next = inputs + longest, *row = next + longest;
    std::fill_n(next, longest, kIgnored);
    std::fill_n(row, longest, numbers[i / 2]);
    for (size_t at = 0; at < documents[i].size(); at++) {
      const auto token = token_of(documents[i][at]);
      if (token >= file_.vocabulary())
        throw IoError("{} is damaged: a token is {}, but the vocabulary has {}", file_.path(), token, file_.vocabulary());
      inputs[at] = token;
      if (at == 0) continue;
      next[at - 1] = token;
      if (!is_only_read(documents[i][at])) targets[at - 1] = token;
    }
  }
  return samples;
}

PairBatch::PairBatch(const data::Samples& samples)
    : tokens(samples.inputs.select(2, 0)),
      next(samples.inputs.select(2, 1)),
      targets(samples.targets),
      numbers(samples.inputs.select(2, 2).select(1, 0).select(1, 0)) {}

at::Tensor PairBatch::counted() const {
  return (targets != kIgnored).flatten(1).any(1);
}

at::Tensor PairBatch::in_documents() const {
  const auto follow = next != kIgnored;
  return at::cat({at::ones_like(follow.narrow(2, 0, 1)), follow.narrow(2, 0, follow.size(2) - 1)}, 2);
}

at::Tensor log_probabilities(const at::Tensor& losses, const PairBatch& batch) {
  return -(losses * (batch.targets != kIgnored)).sum(2);
}

PairSums pair_sums(const at::Tensor& losses, const PairBatch& batch, const Preference& preference, const at::Tensor& reference) {
  const bool is_dpo = preference.kind == Preference::Kind::Dpo;
  const auto counted = batch.counted();
  const auto sums = log_probabilities(losses, batch);
  const auto means = sums / (batch.targets != kIgnored).sum(2).clamp_min(1);
  // A pair that only fills the batch has probabilities of 1, whose log odds are infinite.
  const auto rated = is_dpo ? sums - reference.index_select(0, batch.numbers) : at::where(counted.unsqueeze(1), means, -1);
  const auto chosen = rated.select(1, 0), rejected = rated.select(1, 1);
  const auto margin = is_dpo ? preference.beta * (chosen - rejected) : chosen - rejected - log_of_rest(chosen) + log_of_rest(rejected);
  const auto of_pair = -at::log_sigmoid(margin) * (is_dpo ? 1 : preference.beta);
  const auto over_pairs = [&](const at::Tensor& values) { return at::where(counted, values, 0).sum(); };
  const auto text = is_dpo ? at::zeros_like(batch.next.select(1, 0), at::kBool) : (batch.next.select(1, 0) != kIgnored) & counted.unsqueeze(1);
  const auto reward = [&](const at::Tensor& rating) { return over_pairs(preference.beta * rating.detach()); };
  return {.loss = over_pairs(of_pair),
          .text_loss = (losses.select(1, 0) * text).sum(),
          .pairs = counted.sum().to(losses.scalar_type()),
          .tokens = text.sum().to(losses.scalar_type()),
          .chosen = reward(chosen),
          .rejected = reward(rejected),
          .accurate = over_pairs((chosen > rejected).to(losses.scalar_type()))};
}

}  // namespace tessera::llm
