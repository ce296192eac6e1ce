// Parameters of a unit that were on the meta device when it was made, and that nobody has initialised or loaded since.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/shard/unit/unit.h"

namespace tessera {

/// Somebody has written the parameter.
void note_values(const Unit& unit, const Unit::Parameter& parameter);
/// Somebody has written this shard, or a view of one.
void note_values(const Unit& unit, const at::Tensor& shard);
/// Throws UsageError if there are any: `what` needs their values.
void expect_values(const Unit& unit, std::string_view what);
/// The same, if this shard, or view of one, has any part in them.
void expect_values_of(const Unit& unit, const at::Tensor& shard, std::string_view what);

}  // namespace tessera
