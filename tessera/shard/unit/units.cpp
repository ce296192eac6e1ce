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

std::string class_name(const torch::nn::Module& module) {
  auto name = module.name();
  if (const auto colon = name.rfind(':'); colon != std::string::npos) name.erase(0, colon + 1);
  if (name.ends_with("Impl")) name.erase(name.size() - 4);
  return name;
}

std::string path_below(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

}  // namespace tessera
