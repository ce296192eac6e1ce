#include "tessera/llm/units.h"

#include <array>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/fully_shard.h"

namespace tessera::llm {

Units units_named(std::string_view name) {
  constexpr std::array<std::string_view, 3> kNames = {"root", "apart", "head-with-norm"};
  for (size_t i = 0; i < kNames.size(); i++) {
    if (name == kNames[i]) return static_cast<Units>(i);
  }
  throw ConfigError("there is no choice of units '{}'; choose one of root, apart, head-with-norm", printable(name));
}

void shard_ends(models::LlamaForCausalLM& model, const ShardOptions& options, Units units) {
  if (units == Units::Root) return;
  const bool tied = model->lm_head.is_empty();
  if (!tied) fully_shard(model->model->embed_tokens, options);
  if (tied || units == Units::Apart) {
    fully_shard(model->model->norm, options);
    if (!tied) fully_shard(model->lm_head, options);
  } else {
    const std::shared_ptr<torch::nn::Module> both[] = {model->model->norm.ptr(), model->lm_head.ptr()};
    fully_shard(both, options);
  }
}

void shard_experts(models::LlamaForCausalLM& model, const ShardOptions& options) {
  for (const auto& module : model->modules()) {
    if (module->as<models::LlamaExpert>() != nullptr) fully_shard(module, options);
  }
}

}  // namespace tessera::llm
