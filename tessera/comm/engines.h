// The table of engines, which init, TESSERA_TRANSPORT, `tessera env` and `tessera test` read.
#pragma once

#include <span>
#include <string_view>

#include "tessera/comm/engine.h"

namespace tessera {

/// All of them; `auto` takes the first that fits.
std::span<const Engine> engines();
/// Adds a row while the library is loaded, for an engine of a folder that this one may not include.
struct AddedEngine {
  explicit AddedEngine(const Engine& engine);
};
/// Throws UsageError that lists the names.
const Engine& engine_named(std::string_view name);

}  // namespace tessera
