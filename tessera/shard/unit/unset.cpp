#include "tessera/shard/unit/unset.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {

void note_values(const Unit& unit, const Unit::Parameter& parameter) {
  if (std::exchange(parameter.unset, false)) unit.flags().unset--;
}

void note_values(const Unit& unit, const at::Tensor& shard) {
  for (const auto* parameter : unit.parameters_in(shard)) note_values(unit, *parameter);
}

void expect_values(const Unit& unit, std::string_view what) {
  if (unit.flags().unset == 0) return;
  std::vector<std::string> names;
  for (const auto& group : unit.groups()) {
    for (const auto& parameter : group.parameters) {
      if (parameter.unset) names.push_back(parameter.name);
    }
  }
  throw UsageError(
      fmt::format("{} needs the values of {}, but nobody has loaded or initialised them: load_weights, checkpoint::load and "
                  "load_full_state_dict load parameters, ShardOptions::param_init_fn initialises those of a module on the meta device, and "
                  "deferred_init records how a module makes its own",
                  what, some_of(names)));
}

void expect_values_of(const Unit& unit, const at::Tensor& shard, std::string_view what) {
  const auto parameters = unit.parameters_in(shard);
  if (std::ranges::any_of(parameters, [](const Unit::Parameter* parameter) { return parameter->unset; })) expect_values(unit, what);
}

}  // namespace tessera
