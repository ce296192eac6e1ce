// Writes a compiler's figures for a program as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "tessera/xla/pjrt/program.h"

namespace tessera::pjrt {

/// Returns {"memory": {"arguments": 8, ...} in bytes of each device, "cost": {"flops": 2e9, ...}, "operations": {"all-gather": 1, ...},
/// "collectives": {"all-gather": {"count": 1, "bytes": 64}, ...}}. Leaves out operations and collectives if the plugin does not report
/// them.
nlohmann::ordered_json figures_of(const CompiledProgram& program);

}  // namespace tessera::pjrt
