#include "tessera/shard/unit/units.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/shard/unit/unit.h"

namespace tessera {

std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  for (const auto& entry : module.parameters()) {
    const auto* tag = is_paged(entry) ? tag_of(entry) : nullptr;
    auto unit = tag != nullptr ? tag->unit.lock() : nullptr;
    if (unit && std::ranges::find(result, unit) == result.end()) result.push_back(std::move(unit));
  }
  return result;
}

}  // namespace tessera
