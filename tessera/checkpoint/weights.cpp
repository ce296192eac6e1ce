#include "tessera/checkpoint/weights.h"

#include <ATen/core/grad_mode.h>

#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/write_guard.h"

namespace tessera::checkpoint {

void load_weights(torch::nn::Module& module, const std::filesystem::path& path, const LoadOptions& options) {
  expect_idle("load_weights");
  const c10::AutoGradMode no_grad(false);
  const CatalogReader stored(read_model(path));
  const auto model = local_values(module);
  std::set<std::string> names;
  for (const auto& [name, tensor] : stored.catalog().tensors) names.insert(name);
  const ModelPlan plan(stored, std::move(names), model, options, path.string());
  for (const auto& bytes : stored.catalog().checksums) stored.verify(bytes);
  const WriteGuard guard(model.units, WriteKind::Load);
  plan.load(local_values(module), world_of(module).value_or(self_world()));
}

}  // namespace tessera::checkpoint
