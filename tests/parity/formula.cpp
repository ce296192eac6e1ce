#include "formula.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <numeric>

#include "models.h"
#include "tessera/shard/unit/layout.h"

namespace tessera::parity {
namespace {

constexpr int64_t kAligned = 16;  // values: 64 bytes of float32, where Tessera begins parameters and chunks

int64_t up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Rows of whichever dimension is divided: each rank's part, padded to that of the first rank.
int64_t rows(const at::Tensor& parameter, int64_t dim, int64_t ranks) {
  const auto count = parameter.size(parameter.dim() > dim ? dim : 0);
  return (count + ranks - 1) / ranks * (parameter.numel() / count);
}

/// The values in one rank's part of these parameters.
int64_t part(const std::vector<at::Tensor>& parameters, const Case& test, Side side) {
  const int64_t ranks = test.mesh.shard;
  const auto layout = side == Side::Fsdp2 ? "rows" : test.get("layout", std::string("flat"));
  int64_t total = 0;
  if (layout == "rows") {
    for (const auto& parameter : parameters) total += rows(parameter, test.get<int64_t>("shard_dim", 0), ranks);
    return total;
  }
  std::vector<int64_t> numels;
  for (const auto& parameter : parameters) numels.push_back(parameter.numel());
  if (layout == "whole") return whole_parameter_layout(numels, kAligned, {.rank = 0, .ranks = test.mesh.shard}).chunk;
  for (const auto numel : numels) total += up(numel, kAligned);
  return up((total + ranks - 1) / ranks, std::lcm(kAligned, test.get<int64_t>("shard_size_multiple", 1)));
}

struct UnitSizes {
  std::string name;
  int64_t trained = 0, frozen = 0;  // values in one rank's part
};

std::vector<UnitSizes> sizes_of(const Case& test, Side side) {
  const auto model = make_model(test.model);
  for (auto& parameter : parameters_of(*model, test.names("frozen"))) parameter.set_requires_grad(false);
  auto taken = parameters_of(*model, test.names("ignored"));
  for (const auto& parameter : parameters_of(*model, test.names("replicated"))) taken.push_back(parameter);
  auto units = test.units;
  units.push_back({""});
  std::vector<UnitSizes> result;
  for (const auto& unit : units) {
    std::vector<at::Tensor> trained, frozen;
    for (const auto& name : unit) {
      for (const auto& parameter : distinct_parameters(*module_of(*model, name))) {
        if (std::ranges::any_of(taken, [&](const auto& known) { return known.is_same(parameter); })) continue;
        taken.push_back(parameter);
        (parameter.requires_grad() ? trained : frozen).push_back(parameter);
      }
    }
    result.push_back({.name = unit.front(), .trained = part(trained, test, side), .frozen = part(frozen, test, side)});
  }
  return result;
}

int64_t width(std::optional<at::ScalarType> dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype.value_or(at::kFloat)));
}

/// How often a unit is gathered in a pass, if the case says so.
std::optional<int64_t> gathers_in(const Case& test, const std::string& key, const std::string& unit) {
  const auto own = test.get(key, nlohmann::json::object());
  return own.contains(unit) ? std::optional(own[unit].get<int64_t>()) : std::nullopt;
}

/// How many parts of a unit a rank receives in the gathers of one pass.
int64_t parts_gathered(const Case& test, const std::string& unit, Side side) {
  const int64_t others = test.mesh.shard - 1;
  if (side == Side::Tessera && test.get("residence", std::string()) == "node-shared") return 0;
  if (const auto own = gathers_in(test, "tessera_gathers", unit); own && side == Side::Tessera) return *own * others;
  if (const auto own = gathers_in(test, "gathers", unit)) return *own * others;
  if (!test.has("reshard_after_forward")) return (unit.empty() ? 1 : 2) * others;
  const auto& rule = test.settings["reshard_after_forward"];
  if (rule.is_boolean()) return (rule.get<bool>() ? 2 : 1) * others;
  const auto smaller = rule.get<int64_t>();  // each rank of the smaller group then has several parts
  return others + (smaller - 1) * (test.mesh.shard / smaller);
}

/// The bytes of a value of a gradient that is sent. FSDP2 sends what it adds. Tessera sends what is narrower, and adds in float32; several
/// passes that are reduced together are added before.
int64_t gradient_width(const Case& test, Side side, bool unsynced) {
  const auto computed = unsynced ? width({}) : width(test.dtype("param_dtype"));
  const auto reduced = test.has("reduce_dtype") ? width(test.dtype("reduce_dtype")) : computed;
  return side == Side::Fsdp2 ? reduced : std::min(reduced, computed);
}

}  // namespace

Bytes bytes_by_formula(const Case& test, Side side) {
  const auto passes = test.get<int64_t>("passes", 1);
  const auto accumulate = test.get("accumulate", std::string());
  const bool unsynced = !accumulate.empty() && accumulate != "requires_all_reduce";
  Bytes result;
  for (const auto& unit : sizes_of(test, side)) {
    const auto gathers = (test.has("reshard_after_backward") ? 1 : passes) * parts_gathered(test, unit.name, side);
    const auto reductions = gathers_in(test, "gathers", unit.name) == 0 ? 0 : unsynced ? 1 : passes;
    result.gathered += gathers * width(test.dtype("param_dtype")) * (unit.trained + unit.frozen);
    result.reduced += reductions * (test.mesh.shard - 1) * gradient_width(test, side, unsynced) * unit.trained;
    if (test.mesh.replicate > 1) result.all_reduced += 4 * unit.trained;
  }
  if (side == Side::Fsdp2) return result;  // the program reduces those that are left out
  for (const auto& parameter : parameters_of(*make_model(test.model), test.names("replicated"))) {
    result.all_reduced += 4 * up(parameter.numel(), kAligned);
  }
  return result;
}

}  // namespace tessera::parity
