#include "tessera/shard/model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/shard/marker.h"
#include "tessera/shard/schedule.h"
#include "tessera/shard/unit.h"
#include "tessera/shard/unit_node.h"

namespace tessera {
namespace {

std::string size_text(uint64_t bytes) {
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  std::set<c10::TensorImpl*> seen;
  const auto all_units = units(module);
  const auto ignored = [&](const at::Tensor& parameter) {
    return std::ranges::any_of(all_units, [&](const auto& unit) {
      return std::ranges::any_of(unit->options().ignored, [&](const at::Tensor& known) { return known.is_same(parameter); });
    });
  };
  std::string outside;
  for (const auto& item : module.named_parameters()) {
    const auto& entry = item.value();
    const auto found = locate(entry);
    const auto& tensor = found.parameter != nullptr ? found.parameter->shard : entry;
    if (found.parameter == nullptr && entry.requires_grad() && outside.empty() && !ignored(entry)) outside = item.key();
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) result.emplace_back(item.key(), tensor);
  }
  if (!all_units.empty() && !outside.empty()) {
    throw UsageError(
        fmt::format("parameter '{}' is trainable, but in no unit, so its gradients would not be averaged over the ranks; shard the whole "
                    "module last, freeze the parameter, or name it in ShardOptions::ignored",
                    outside));
  }
  return result;
}

std::vector<at::Tensor> parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (auto& [name, parameter] : named_parameters(module)) result.push_back(std::move(parameter));
  return result;
}

std::optional<ShardInfo> shard_info(const at::Tensor& shard) {
  const auto found = locate(shard);
  if (found.parameter == nullptr) return std::nullopt;
  return ShardInfo{.unit = found.unit->name(),
                   .name = found.parameter->name,
                   .shape = found.parameter->sizes,
                   .begin = found.parameter->span.shard_begin,
                   .numel = found.parameter->span.shard_numel};
}

std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  for (const auto& entry : module.parameters()) {
    const auto* marker = is_paged(entry) ? marker_of(entry) : nullptr;
    auto unit = marker != nullptr ? marker->unit.lock() : nullptr;
    if (unit && std::ranges::find(result, unit) == result.end()) result.push_back(std::move(unit));
  }
  return result;
}

ModelCounters counters(const torch::nn::Module& module) {
  ModelCounters total;
  for (const auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    const auto& own = unit->counters();
    total.gathers += own.gathers;
    total.reductions += own.reductions;
    total.gathered_bytes += own.gathered_bytes;
    total.peak_whole_bytes = std::max(total.peak_whole_bytes, schedule->counters().peak_bytes);
    total.misses = schedule->counters().misses;
  }
  return total;
}

void reset_counters(const torch::nn::Module& module) {
  for (const auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    unit->reset_counters();
    schedule->reset_counters();
  }
}

std::string describe(const torch::nn::Module& module) {
  std::string text =
      fmt::format("{:<28}{:>12}{:>12}{:>12}  {:<9}{:>9}{:>9}\n", "unit", "parameters", "whole", "shard", "dtype", "gathers", "reduced");
  uint64_t peak = 0, misses = 0;
  for (const auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    int64_t numel = 0;
    uint64_t shard_bytes = 0;
    std::set<std::string> dtypes;
    for (const auto& group : unit->groups()) {
      for (const auto& parameter : group.parameters) numel += parameter.span.numel;
      shard_bytes += group.own.nbytes();
      dtypes.insert(c10::toString(group.full_dtype));
    }
    text += fmt::format("{:<28}{:>12}{:>12}{:>12}  {:<9}{:>9}{:>9}\n", unit->name(), numel, size_text(unit->whole_bytes()),
                        size_text(shard_bytes), fmt::format("{}", fmt::join(dtypes, "+")), unit->counters().gathers,
                        unit->counters().reductions);
    peak = std::max(peak, schedule->counters().peak_bytes);
    misses = schedule->counters().misses;
  }
  return text + fmt::format("peak of whole units {}, uses not foreseen {}\n", size_text(peak), misses);
}

void set_requires_grad(const torch::nn::Module& module, Training training) {
  const bool trained = training == Training::Trained;
  for (const auto& entry : module.parameters()) {
    const auto found = locate(entry);
    if (found.parameter == nullptr) {
      auto own = entry;
      own.set_requires_grad(trained);
      continue;
    }
    found.parameter->shard.set_requires_grad(trained);
  }
  for (const auto& unit : units(module)) attach_unit_node(unit);
}

}  // namespace tessera
