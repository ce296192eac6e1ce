#include "tessera/shard/unit/figures.h"

#include <fmt/ranges.h>

#include <set>

namespace tessera {

UnitFigures figures_of(Unit& unit) {
  const auto& memory = unit.memory();
  UnitFigures own{.name = unit.name(), .unsharded = memory.unsharded_bytes(unit.buffers()), .residence = std::string(memory.residence)};
  std::set<std::string> dtypes;
  for (const auto& group : unit.groups()) {
    own.shard += group.own.nbytes();
    dtypes.insert(c10::toString(group.unsharded_dtype));
    for (const auto& parameter : group.parameters) own.parameters += parameter.span.numel;
  }
  own.dtype = fmt::format("{}", fmt::join(dtypes, "+"));
  return own;
}

}  // namespace tessera
