#include "tessera/shard/model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/rank_range.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"

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

std::string size_text(uint64_t bytes) {
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", static_cast<double>(bytes) / 1e3);
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

/// A row of the table of units.
struct Line {
  std::string name;
  int64_t numel = 0;
  uint64_t unsharded_bytes = 0, shard_bytes = 0;
  std::string dtypes = {}, residence = {};
  UnitCounters counters = {};
};

/// Indented, and so short that a unit of many modules does not push the numbers off the screen.
std::string shown_name(const std::string& name, size_t depth) {
  constexpr size_t kMost = 40, kEnd = 18;
  const auto shown = name.size() <= kMost ? name : name.substr(0, kMost - kEnd - 3) + "..." + name.substr(name.size() - kEnd);
  return std::string(2 * depth, ' ') + shown;
}

Line line_of(Unit& unit, size_t depth) {
  const auto lock = unit.schedule()->lock();
  Line line{.name = shown_name(unit.name(), depth), .unsharded_bytes = unit.unsharded_bytes(), .counters = unit.counters()};
  std::set<std::string> dtypes;
  for (const auto& group : unit.groups()) {
    for (const auto& parameter : group.parameters) line.numel += parameter.span.numel;
    line.shard_bytes += group.own.nbytes();
    dtypes.insert(c10::toString(group.unsharded_dtype));
  }
  line.residence = unit.residence();
  line.dtypes = fmt::format("{}", fmt::join(dtypes, "+"));
  return line;
}

/// The unit of the whole model bears the name of its class; all others that of their place in it, with which their parameters begin.
bool is_whole_model(Unit& unit) {
  const auto place = unit.name().substr(0, unit.name().find('+'));  // the first of a unit of several modules
  return !unit.groups().front().parameters.front().name.starts_with(place + ".");
}

struct InTree {
  std::shared_ptr<Unit> unit;
  size_t depth = 0;
};

/// Every unit behind the one whose module contains its own. A name ends where a place below it goes on with a dot.
std::vector<InTree> in_tree_order(const std::vector<std::shared_ptr<Unit>>& all) {
  const auto contains = [](const std::shared_ptr<Unit>& outer, const std::shared_ptr<Unit>& inner) {
    if (outer == inner || outer->schedule() != inner->schedule()) return false;
    return is_whole_model(*outer) ? !is_whole_model(*inner) : inner->name().starts_with(outer->name() + ".");
  };
  std::vector<InTree> result;
  for (const auto& unit : all) {
    const auto depth = std::ranges::count_if(all, [&](const auto& other) { return contains(other, unit); });
    // An outer unit may come late, since its own parameters may: then it goes before the first that it contains.
    const auto at = std::ranges::find_if(result, [&](const InTree& known) { return contains(unit, known.unit); });
    result.insert(at, {.unit = unit, .depth = static_cast<size_t>(depth)});
  }
  return result;
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
  const auto whole = [](const at::Tensor& parameter) { return parameter.defined() && !is_paged(parameter) && parameter.requires_grad(); };
  if (std::ranges::none_of(parameters, whole)) return;  // nearly always
  std::vector<std::shared_ptr<Unit>> owners;
  for (const auto& parameter : parameters) {
    auto unit = locate(parameter).unit;
    if (unit && (owners.empty() || owners.back() != unit)) owners.push_back(std::move(unit));
  }
  if (owners.empty()) return;
  for (const auto& parameter : parameters) {
    if (!whole(parameter) || ignored(owners, parameter)) continue;
    refuse_outsider(fmt::format("of shape [{}], given together with shards,", fmt::join(parameter.sizes(), ", ")));
  }
}

std::optional<ShardInfo> shard_info(const at::Tensor& shard) {
  const auto found = locate(shard);
  if (found.parameter == nullptr) return std::nullopt;
  std::vector<TensorSlice> slices;
  for (const int rank : found.unit->mesh().world().local_ranks()) {
    const auto range = range_of_rank(found.unit->mesh(), found.parameter->span, rank);
    const auto own = slices_of_range(found.parameter->sizes, found.parameter->strides, range.begin, range.numel);
    slices.insert(slices.end(), own.begin(), own.end());
  }
  return ShardInfo{.unit = found.unit->name(),
                   .name = found.parameter->name,
                   .shape = found.parameter->sizes,
                   .begin = found.parameter->span.shard_begin,
                   .numel = found.parameter->span.shard_numel,
                   .slices = std::move(slices)};
}

std::vector<std::shared_ptr<Unit>> units(const torch::nn::Module& module) {
  std::vector<std::shared_ptr<Unit>> result;
  for (const auto& entry : module.parameters()) {
    const auto* tag = is_paged(entry) ? tag_of(entry) : nullptr;
    auto unit = tag != nullptr ? tag->unit.lock() : nullptr;
    if (unit && std::ranges::find(result, unit) == result.end()) result.push_back(std::move(unit));
  }
  return result;
}

ModelCounters counters(const torch::nn::Module& module) {
  ModelCounters total;
  std::set<const Schedule*> seen;  // one, unless the whole module is not sharded
  for (const auto& unit : units(module)) {
    const auto schedule = unit->schedule();
    const auto lock = schedule->lock();
    const auto& own = unit->counters();
    total.gathers += own.gathers;
    total.reductions += own.reductions;
    total.gathered_bytes += own.gathered_bytes;
    total.peak_unsharded_bytes = std::max(total.peak_unsharded_bytes, schedule->counters().peak_bytes);
    if (seen.insert(schedule.get()).second) total.misses += schedule->counters().misses;
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

void skip_step(const torch::nn::Module& module) {
  const auto has_gradient = [](const Unit::Group& group) {
    return std::ranges::any_of(group.parameters, [](const Unit::Parameter& parameter) { return parameter.shard.grad().defined(); });
  };
  for (const auto& unit : units(module)) {
    if (std::ranges::any_of(unit->groups(), has_gradient)) unit->schedule()->skip_update(*unit);
  }
}

std::string describe(const torch::nn::Module& module) {
  std::vector<Line> lines;
  for (const auto& unit : in_tree_order(units(module))) lines.push_back(line_of(*unit.unit, unit.depth));
  size_t width = 4;
  for (const auto& line : lines) width = std::max(width, line.name.size());
  auto text = fmt::format("{:<{}}{:>12}{:>11}{:>11}  {:<8}{:<11}{:>9}{:>11}{:>9}\n", "unit", width, "parameters", "whole", "shard", "dtype",
                          "residence", "gathers", "gathered", "reduced");
  for (const auto& line : lines) {
    text += fmt::format("{:<{}}{:>12}{:>11}{:>11}  {:<8}{:<11}{:>9}{:>11}{:>9}\n", line.name, width, line.numel,
                        size_text(line.unsharded_bytes), size_text(line.shard_bytes), line.dtypes, line.residence, line.counters.gathers,
                        size_text(line.counters.gathered_bytes), line.counters.reductions);
  }
  const auto total = counters(module);
  return text + fmt::format("peak of whole units {}, uses not foreseen {}\n", size_text(total.peak_unsharded_bytes), total.misses);
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
    const auto lock = found.unit->schedule()->lock();
    found.parameter->shard.set_requires_grad(trained);
  }
}

}  // namespace tessera
