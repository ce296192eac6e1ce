// The figures of a unit, for records and descriptions.
#pragma once

#include "tessera/comm/unit_figures.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

/// Without its depth. The caller holds the lock of the unit's schedule.
UnitFigures figures_of(Unit& unit);

}  // namespace tessera
