#include "tessera/shard/rebind.h"

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>

#include "tessera/base/error.h"
#include "tessera/shard/unit/ignored_parameters.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {

void rebind(torch::optim::Optimizer& optimizer, ConstModuleRef module) {
  std::map<c10::TensorImpl*, at::Tensor> shards;
  for (const auto& unit : units(module)) {
    for (const auto& parameter : parameters_of(*unit)) {
      if (const auto member = parameter.unsharded.lock(); member.defined()) shards[member.unsafeGetTensorImpl()] = parameter.shard;
    }
  }
  bool any = false;
  // The new lists of all groups. They are applied at the end, so that an error leaves the optimizer unchanged.
  std::vector<std::vector<at::Tensor>> now;
  for (const auto& group : optimizer.param_groups()) {
    auto& list = now.emplace_back();
    for (const auto& parameter : group.params()) {
      const auto found = shards.find(parameter.unsafeGetTensorImpl());
      if (found == shards.end()) {
        list.push_back(parameter);
        continue;
      }
      if (optimizer.state().count(parameter.unsafeGetTensorImpl()) > 0) {
        throw UsageError(
            "rebind: the optimizer has taken steps already, so its state has the sizes of whole parameters; call rebind before the first "
            "step, or make the optimizer after fully_shard");
      }
      // With Listing::Flat, several parameters have the same shard.
      if (!is_in(list, found->second)) list.push_back(found->second);
      any = true;
    }
  }
  if (!any)
    throw UsageError("rebind: the optimizer holds no parameter of this model that fully_shard has sharded; pass the model that the optimizer was made for");
  for (size_t i = 0; i < now.size(); i++) optimizer.param_groups()[i].params() = std::move(now[i]);
}

}  // namespace tessera
