// Generates text with a model, token by token.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/models/llama.h"

namespace tessera::models {

/// How a token is chosen: by the scores that remain of a penalty, the temperature, top_k, top_p and min_p, one after the other, as
/// transformers' logits processors compute them.
struct GenerateOptions {
  int64_t most = 64;               // how many tokens are added
  double temperature = 0;          // 0: always the likeliest token; 1: by the model's own probabilities
  int64_t top_k = 0;               // a token is drawn from so many of the likeliest ones; 0: from all
  double top_p = 1;                // a token is drawn from the likeliest tokens that together have this probability
  double min_p = 0;                // a token is drawn from those with at least this share of the likeliest token's probability
  double repetition_penalty = 1;   // positive scores of tokens that the text has already are divided by it, negative ones multiplied
  int64_t vocabulary = 0;          // only tokens below this number are generated; 0: all that the model knows
  uint64_t seed = 0;               // the seed of random numbers; must be the same on all ranks
  std::vector<int64_t> ends = {};  // tokens that end a row, which repeats the token from then on; generation ends when all rows have one
  /// Called with each new token of the first row; generation ends if it returns false. It must return the same on all ranks.
  std::function<bool(int64_t)> listen = {};
  /// A cache that holds the beginning of the text already, and after the call all of it but the last token. Must have room for the text.
  LlamaCache* cache = nullptr;
};

/// Takes tokens {batch, length}, rows without padding, and returns {batch, length + added}. The model may be sharded: then all ranks call
/// it with the same tokens, and get the same text. Keys and values of the text are cached, so each new token takes a pass over one token.
at::Tensor generate(LlamaForCausalLMImpl& model, const at::Tensor& tokens, const GenerateOptions& options = {});

/// Returns the probabilities {batch, vocabulary} with which the options choose the token after the texts {batch, length}. `scores` are those
/// of a model for that token, {batch, vocabulary}. At temperature 0 the likeliest token has all.
at::Tensor probabilities_of(const at::Tensor& scores, const at::Tensor& texts, const GenerateOptions& options);

}  // namespace tessera::models
