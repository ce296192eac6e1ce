// Generates text with a model, token by token.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/models/llama.h"

namespace tessera::models {

struct GenerateOptions {
  int64_t most = 64;               // how many tokens are added
  double temperature = 0;          // 0: always the likeliest token; 1: by the model's own probabilities
  double top_p = 1;                // a token is drawn from the likeliest tokens that together have this probability
  int64_t vocabulary = 0;          // only tokens below this number are generated; 0: all that the model knows
  uint64_t seed = 0;               // the seed of random numbers; must be the same on all ranks
  std::vector<int64_t> ends = {};  // tokens that end a row, which repeats the token from then on; generation ends when all rows have one
  /// Called with each new token of the first row.
  std::function<void(int64_t)> listen = {};
};

/// Takes tokens {batch, length}, rows without padding, and returns {batch, length + added}. The model may be sharded: then all ranks call
/// it with the same tokens, and get the same text. Keys and values of the text are cached, so each new token takes a pass over one token.
at::Tensor generate(LlamaForCausalLMImpl& model, const at::Tensor& tokens, const GenerateOptions& options = {});

}  // namespace tessera::models
