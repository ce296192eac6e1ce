#include "tessera/shard/parameters.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <set>

#include "tessera/shard/access/gradients.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {

std::vector<std::pair<std::string, at::Tensor>> named_parameters(ConstModuleRef module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::set<c10::TensorImpl*> seen;
  const auto all_units = units(module);
  // The program may have replaced all modules with units since fully_shard. Shards that are left of such modules belong to no unit.
  const bool lost_all = all_units.empty() && boundary_of(module).has_units;
  const auto trains_outside = [&](const at::Tensor& entry) {
    return entry.requires_grad() && !is_ignored(entry) && (lost_all ? !is_paged(entry) : !all_units.empty());
  };
  std::string outside;
  for (const auto& item : module->named_parameters()) {
    const auto& entry = item.value();
    const auto found = locate(entry);
    const auto& tensor = found.parameter != nullptr ? found.parameter->shard : entry;
    if (found.parameter == nullptr && outside.empty() && trains_outside(entry)) outside = item.key();
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) result.emplace_back(item.key(), tensor);
  }
  if (!outside.empty()) refuse_not_averaged(fmt::format("'{}'", outside));
  return result;
}

std::vector<at::Tensor> parameters(ConstModuleRef module) {
  std::vector<at::Tensor> result;
  for (auto& [name, parameter] : named_parameters(module)) result.push_back(std::move(parameter));
  return result;
}

std::optional<ShardInfo> shard_info(const at::Tensor& shard) {
  const auto found = locate(shard);
  if (found.parameter == nullptr) return std::nullopt;
  const auto& parameter = *found.parameter;
  ShardInfo info{.unit = found.unit->name(),
                 .name = parameter.name,
                 .shape = parameter.sizes,
                 .strides = parameter.strides,
                 .ranges = parameter.ranges,
                 .slices = {},
                 .begin = parameter.span.shard_begin,
                 .numel = parameter.span.shard_numel};
  for (const auto& range : info.ranges) {
    const auto slices = slices_of_range(info.shape, info.strides, range.begin, range.numel);
    info.slices.insert(info.slices.end(), slices.begin(), slices.end());
  }
  return info;
}

}  // namespace tessera
