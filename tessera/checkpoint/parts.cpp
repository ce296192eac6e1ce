#include "tessera/checkpoint/parts.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/part_records.h"
#include "tessera/shard/model.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"

namespace tessera::checkpoint {
ModelParts parts_of(const torch::nn::Module& model) {
  ModelParts result{.units = units(model)};
  // The model's names go before the units': a unit may have been made without a look at the whole model.
  std::map<const void*, std::string> names;  // by unit's parameter, or by tensor
  for (const auto& item : model.named_parameters()) {
    const auto& tensor = item.value();
    const auto* parameter = locate(tensor).parameter;
    if (is_paged(tensor) && parameter == nullptr) continue;
    const void* const key = parameter != nullptr ? static_cast<const void*>(parameter) : tensor.unsafeGetTensorImpl();
    const auto [known, is_new] = names.try_emplace(key, item.key());
    if (!is_new) {
      result.aliases[item.key()] = known->second;
    } else if (parameter == nullptr) {
      result.whole[item.key()] = tensor.detach();
    }
  }
  for (const auto& unit : result.units) {
    for (const auto& group : unit->groups()) {
      for (const auto& parameter : group.parameters) {
        const auto name = names.find(&parameter);
        result.parts.push_back({.name = name != names.end() ? name->second : parameter.name,
                                .values = group.own.narrow(0, parameter.span.shard_offset, parameter.span.shard_numel),
                                .records = records_of(*unit, parameter)});
      }
    }
  }
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) result.buffers[item.key()] = item.value();
  }
  return result;
}

void about_to_replace(const ModelParts& model) {
  for (const auto& unit : model.units) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    schedule->about_to_write(*unit);
    if (unit->late()) throw CommError("the ranks load a checkpoint while some still write parameters; load on all ranks at one place");
    unit->outdate({});
    unit->trust_start();
  }
}

}  // namespace tessera::checkpoint
