#include "tessera/shard/parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

bool ignored(std::span<const std::shared_ptr<Unit>> all_units, const at::Tensor& parameter) {
  return std::ranges::any_of(all_units, [&](const auto& unit) {
    return std::ranges::any_of(unit->options().ignored, [&](const at::Tensor& known) { return known.is_same(parameter); });
  });
}

[[noreturn]] void refuse_outsider(const std::string& which) {
  throw UsageError(fmt::format(
      "parameter {} is trainable, but in no unit, so its gradients would not be averaged over the ranks; shard the whole module "
      "last, freeze the parameter, or name it in ShardOptions::ignored",
      which));
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::set<c10::TensorImpl*> seen;
  const auto all_units = units(module);
  std::string outside;
  for (const auto& item : module.named_parameters()) {
    const auto& entry = item.value();
    const auto found = locate(entry);
    const auto& tensor = found.parameter != nullptr ? found.parameter->shard : entry;
    if (found.parameter == nullptr && entry.requires_grad() && outside.empty() && !ignored(all_units, entry)) outside = item.key();
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) result.emplace_back(item.key(), tensor);
  }
  if (!all_units.empty() && !outside.empty()) refuse_outsider(fmt::format("'{}'", outside));
  return result;
}

std::vector<at::Tensor> parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (auto& [name, parameter] : named_parameters(module)) result.push_back(std::move(parameter));
  return result;
}

void expect_averaged(std::span<const at::Tensor> parameters) {
  const auto trains_unsharded = [](const at::Tensor& parameter) {
    return parameter.defined() && !is_paged(parameter) && parameter.requires_grad();
  };
  if (std::ranges::none_of(parameters, trains_unsharded)) return;  // by far the most frequent case
  std::vector<std::shared_ptr<Unit>> owners;
  for (const auto& parameter : parameters) {
    auto unit = locate(parameter).unit;
    if (unit && (owners.empty() || owners.back() != unit)) owners.push_back(std::move(unit));
  }
  if (owners.empty()) return;
  for (const auto& parameter : parameters) {
    if (!trains_unsharded(parameter) || ignored(owners, parameter)) continue;
    refuse_outsider(fmt::format("of shape [{}], given together with shards,", fmt::join(parameter.sizes(), ", ")));
  }
}

std::optional<ShardInfo> shard_info(const at::Tensor& shard) {
  const auto found = locate(shard);
  if (found.parameter == nullptr) return std::nullopt;
  const auto& parameter = *found.parameter;
  ShardInfo info{.unit = found.unit->name(),
                 .name = parameter.name,
                 .shape = parameter.sizes,
                 .strides = parameter.strides,
                 .ranges = found.unit->ranges_of(parameter),
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
