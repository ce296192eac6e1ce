#include "tessera/checkpoint/parts.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera::checkpoint {
namespace {

/// The part without the padding that may end it.
int64_t numel(const Span& span) {
  return std::clamp<int64_t>(span.numel - span.shard_begin, 0, span.shard_numel);
}

}  // namespace

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
                                .sizes = parameter.sizes,
                                .strides = parameter.strides,
                                .begin = parameter.span.shard_begin,
                                .values = group.own.narrow(0, parameter.span.shard_offset, numel(parameter.span))});
      }
    }
  }
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) result.buffers[item.key()] = item.value();
  }
  return result;
}

}  // namespace tessera::checkpoint
