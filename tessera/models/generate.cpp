#include "tessera/models/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

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

/// Chooses one token for each row of scores {batch, vocabulary}. Returns {batch}.
at::Tensor chosen(at::Tensor scores, const GenerateOptions& options, const at::Generator& random) {
  if (options.vocabulary > 0) scores = scores.narrow(-1, 0, std::min(options.vocabulary, scores.size(-1)));
  if (options.temperature == 0) return scores.argmax(-1);
  auto [likely, tokens] = (scores.to(at::kFloat) / options.temperature).softmax(-1).sort(-1, /*descending=*/true);
  // Leaves out a token if the likelier tokens before it already reach top_p. The first token always stays.
  likely = at::where(likely.cumsum(-1) - likely >= options.top_p, 0, likely);
  likely.select(-1, 0).clamp_min_(1e-30);
  return tokens.gather(-1, likely.multinomial(1, /*replacement=*/false, random)).squeeze(-1);
}

void expect_sense(const at::Tensor& tokens, const GenerateOptions& options, int64_t longest) {
  if (tokens.dim() != 2 || tokens.numel() == 0) throw UsageError("generate: tokens need the shape {batch, length} and at least one value");
  if (options.temperature < 0 || options.top_p <= 0 || options.top_p > 1)
    throw UsageError("generate: the temperature is {} and top_p is {}; the temperature must be at least 0, and top_p in (0, 1]",
                     options.temperature, options.top_p);
  if (tokens.size(1) + options.most > longest)
    throw UsageError("generate: {} tokens and {} new ones are more than this model's max_position_embeddings, {}", tokens.size(1),
                     options.most, longest);
}

}  // namespace

at::Tensor generate(LlamaForCausalLMImpl& model, const at::Tensor& tokens, const GenerateOptions& options) {
  expect_sense(tokens, options, model.model->config.max_position_embeddings);
  const c10::AutoGradMode no_grad(false);
  const Evaluation evaluation(model);
  const auto random = at::detail::createCPUGenerator(options.seed);
  LlamaCache cache(tokens.size(1) + options.most);
  std::vector<at::Tensor> all = {tokens};
  auto ended = at::zeros({tokens.size(0)}, at::kBool);
  for (auto next = tokens; std::ssize(all) <= options.most;) {
    const auto states = call(model.model, next, LlamaInput{.cache = &cache});
    auto token = chosen(model.scores(states.select(1, -1)).cpu(), options, random);
    if (all.size() > 1) token = at::where(ended, all.back().cpu().squeeze(1), token);
    for (const auto end : options.ends) ended = ended | (token == end);
    if (options.listen) options.listen(token[0].item<int64_t>());
    all.push_back(next = token.unsqueeze(1).to(tokens.device()));
    if (ended.all().item<bool>()) break;
  }
  return at::cat(all, 1);
}

}  // namespace tessera::models
