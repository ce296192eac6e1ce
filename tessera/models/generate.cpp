#include "tessera/models/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/no_copy.h"

namespace tessera::models {
namespace {

/// Puts a model into evaluation mode. The destructor restores the former mode.
class Evaluation : NoCopy {
 public:
  explicit Evaluation(torch::nn::Module& model) : model_(model), training_(model.is_training()) { model_.eval(); }
  ~Evaluation() { model_.train(training_); }

 private:
  torch::nn::Module& model_;
  bool training_;
};

/// Returns the scores of tokens that may be generated, after the penalty for those that the texts have.
at::Tensor penalised(const at::Tensor& scores, const at::Tensor& texts, const GenerateOptions& options) {
  auto result = scores;
  if (options.repetition_penalty != 1) {
    const auto found = scores.gather(-1, texts);
    result = scores.scatter(-1, texts, at::where(found < 0, found * options.repetition_penalty, found / options.repetition_penalty));
  }
  return options.vocabulary > 0 ? result.narrow(-1, 0, std::min(options.vocabulary, result.size(-1))) : result;
}

/// Chooses one token for each row of scores {batch, vocabulary}. Returns {batch}.
at::Tensor chosen(const at::Tensor& scores, const at::Tensor& texts, const GenerateOptions& options, const at::Generator& random) {
  if (options.temperature == 0) return penalised(scores, texts, options).argmax(-1);
  return probabilities_of(scores, texts, options).multinomial(1, /*replacement=*/false, random).squeeze(-1);
}

void expect_sense(const at::Tensor& tokens, const GenerateOptions& options, int64_t longest) {
  if (tokens.dim() != 2 || tokens.numel() == 0) throw UsageError("generate: tokens need the shape {batch, length} and at least one value");
  if (options.temperature < 0 || options.top_p <= 0 || options.top_p > 1)
    throw UsageError("generate: the temperature is {} and top_p is {}; the temperature must be at least 0, and top_p in (0, 1]",
                     options.temperature, options.top_p);
  if (options.top_k < 0 || options.min_p < 0 || options.min_p > 1 || options.repetition_penalty <= 0)
    throw UsageError("generate: top_k is {}, min_p {} and repetition_penalty {}; top_k must be at least 0, min_p in [0, 1], the penalty above 0",
                     options.top_k, options.min_p, options.repetition_penalty);
  if (tokens.size(1) + options.most > longest)
    throw UsageError("generate: {} tokens and {} new ones are more than this model's max_position_embeddings, {}", tokens.size(1),
                     options.most, longest);
  if (options.cache != nullptr && options.cache->length() >= tokens.size(1))
    throw UsageError("generate: the cache holds {} tokens of a text of {}; the last one at least must be new", options.cache->length(),
                     tokens.size(1));
}

}  // namespace

at::Tensor probabilities_of(const at::Tensor& scores, const at::Tensor& texts, const GenerateOptions& options) {
  auto left = penalised(scores, texts, options).to(at::kFloat);
  if (options.temperature == 0) return at::zeros_like(left).scatter(-1, left.argmax(-1, /*keepdim=*/true), 1);
  left = left / options.temperature;
  auto kept = left.size(-1);
  if (options.top_k > 0 && options.top_k < kept) {
    const auto least = std::get<0>(left.topk(options.top_k)).narrow(-1, options.top_k - 1, 1);
    const auto is_below = left < least;
    left = left.masked_fill(is_below, -std::numeric_limits<double>::infinity());
    kept -= is_below.sum(-1).min().item<int64_t>();
  }
  if (options.top_p == 1 && options.min_p == 0) return left.softmax(-1);
  auto [likely, tokens] = kept < left.size(-1) ? left.topk(kept) : left.sort(-1, /*descending=*/true);
  likely = likely.softmax(-1);
  // Leaves out a token if the likelier tokens before it already reach top_p. The first token always stays.
  auto out = likely.cumsum(-1) - likely >= options.top_p;
  out = out | (likely < likely.narrow(-1, 0, 1) * options.min_p);
  out.select(-1, 0).fill_(false);
  likely = likely.masked_fill(out, 0);
  return at::zeros_like(left).scatter(-1, tokens, likely / likely.sum(-1, /*keepdim=*/true));
}

at::Tensor generate(LlamaForCausalLMImpl& model, const at::Tensor& tokens, const GenerateOptions& options) {
  expect_sense(tokens, options, model.model->config.max_position_embeddings);
  const c10::AutoGradMode no_grad(false);
  const Evaluation evaluation(model);
  const auto random = at::detail::createCPUGenerator(options.seed);
  const auto before = tokens.size(1);
  LlamaCache own(before + options.most);
  auto* const cache = options.cache == nullptr ? &own : options.cache;
  const auto texts = at::empty({tokens.size(0), before + options.most}, at::kLong);
  texts.narrow(1, 0, before).copy_(tokens);
  auto ended = at::zeros({tokens.size(0)}, at::kBool);
  auto length = before;
  for (auto next = tokens.narrow(1, cache->length(), before - cache->length()); length < before + options.most;) {
    const auto states = call(model.model, next, LlamaInput{.cache = cache});
    auto token = chosen(model.scores(states.select(1, -1)).cpu(), texts.narrow(1, 0, length), options, random);
    if (length > before) token = at::where(ended, texts.select(1, length - 1), token);
    texts.select(1, length++).copy_(token);
    for (const auto end : options.ends) ended = ended | (token == end);
    const bool is_heard = !options.listen || options.listen(token[0].item<int64_t>());
    if (!is_heard || ended.all().item<bool>()) break;
    next = token.unsqueeze(1).to(tokens.device());
  }
  return texts.narrow(1, 0, length).to(tokens.options());
}

}  // namespace tessera::models
