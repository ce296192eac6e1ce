// The table of engines, which init, TESSERA_TRANSPORT, `tessera env` and `tessera test` read.
#pragma once

#include <span>
#include <string_view>

#include "tessera/comm/engine.h"

namespace tessera {

/// All engines; `auto` takes the first that fits.
std::span<const Engine> engines();
/// Adds a row when the library is loaded, for an engine in a folder that this folder may not include.
struct AddedEngine {
  explicit AddedEngine(const Engine& engine);
};
/// Throws a UsageError that lists the names if no engine has this one.
const Engine& engine_named(std::string_view name);

}  // namespace tessera
