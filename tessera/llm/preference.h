// Pairs of answers, of which one is preferred: rows for a data::Loader, and the losses DPO and ORPO, which are those of Python's TRL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/samples.h"
#include "tessera/llm/token_file.h"

namespace tessera::llm {

/// May be used by several threads. Rows do not depend on the number of ranks.
class PairRows {
 public:
  /// Leaves out pairs of which the first `length` tokens of a document have nothing to learn. Throws ConfigError if no pair is left.
  PairRows(TokenFile file, int64_t length);

  int64_t size() const { return std::ssize(pairs_); }
  int64_t left_out() const { return std::ssize(file_.ends()) / 2 - size(); }
  /// Returns a text that identifies these rows, for LoaderOptions::data.
  std::string data() const;

  /// Returns for each pair, of its chosen and its rejected document: inputs {2, 3, longest}, the tokens, the token after each (kIgnored
  /// after the last one) and the number of the row; targets {2, longest}, the tokens after each that are learned, kIgnored elsewhere.
  /// Documents end after `length` tokens, and are padded to the longest one of the batch, in steps of 64.
  data::Samples operator()(std::span<const int64_t> numbers) const;

 private:
  /// The tokens of document 2 * pair, or the one after it.
  std::span<const int32_t> document(int64_t number) const;

  TokenFile file_;
  int64_t length_;
  std::vector<int64_t> pairs_;
};

/// A batch of PairRows.
struct PairBatch {
  at::Tensor tokens, next, targets;  // {pairs, 2, longest}
  at::Tensor numbers;                // {pairs}

  explicit PairBatch(const data::Samples& samples);
  /// {pairs}: false for pairs that only fill the batch (LoaderOptions::target_of_repeats).
  at::Tensor counted() const;
  /// {pairs, 2, longest}: false in padding.
  at::Tensor in_documents() const;
};

struct Preference {
  enum class Kind { Dpo, Orpo } kind = Kind::Dpo;
  double beta = 0.1;
};

/// Sums over the pairs of a batch that count. The loss of any number of batches is loss / pairs + text_loss / tokens, each summed up.
struct PairSums {
  at::Tensor loss, text_loss;            // have gradients; text_loss is the cross entropy of chosen texts, with their prompts, for ORPO
  at::Tensor pairs, tokens;              // tokens of text_loss
  at::Tensor chosen, rejected, accurate;  // rewards, and the number of pairs with the greater reward for the chosen document
};

/// The log probabilities of what is learned: {pairs, 2}. `losses`: LlamaForCausalLM::losses of PairBatch::next, {pairs, 2, longest}.
at::Tensor log_probabilities(const at::Tensor& losses, const PairBatch& batch);

/// `reference`, for DPO: {rows, 2}, the log_probabilities() of all rows by the model before training.
PairSums pair_sums(const at::Tensor& losses, const PairBatch& batch, const Preference& preference, const at::Tensor& reference);

}  // namespace tessera::llm
