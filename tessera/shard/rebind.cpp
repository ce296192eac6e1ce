#include "tessera/shard/rebind.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>

#include "tessera/base/error.h"
#include "tessera/shard/model.h"
#include "tessera/shard/unit.h"

namespace tessera {

void rebind(torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  std::map<c10::TensorImpl*, at::Tensor> shards;
  for (const auto& unit : units(module)) {
    for (const auto& group : unit->groups()) {
      for (const auto& parameter : group.parameters) {
        if (const auto full = parameter.full.lock()) shards[full.get()] = parameter.shard;
      }
    }
  }
  size_t moved = 0;
  for (auto& group : optimizer.param_groups()) {
    std::vector<at::Tensor> now;
    for (const auto& parameter : group.params()) {
      const auto found = shards.find(parameter.unsafeGetTensorImpl());
      if (found == shards.end()) {
        now.push_back(parameter);
        continue;
      }
      if (optimizer.state().count(parameter.unsafeGetTensorImpl()) > 0) {
        throw UsageError(
            "rebind: the optimizer has made steps already, and its state is as large as the whole parameters; make it, or rebind "
            "it, before the first step");
      }
      // Parameters that are listed as one vector have one shard.
      const bool is_new = std::ranges::none_of(now, [&](const at::Tensor& other) { return other.is_same(found->second); });
      if (is_new) now.push_back(found->second);
      moved++;
    }
    group.params() = std::move(now);
  }
  if (moved == 0) throw UsageError("rebind: the optimizer holds no parameter of this model that fully_shard has sharded");
}

}  // namespace tessera
