// Texts that `tessera config explain` and `tessera launch` print about settings.
#pragma once

#include <string>
#include <vector>

#include "tessera/config/settings.h"

namespace tessera::cli {

/// Returns a table of the keys that have an effect or were set, with their values and origins. Remarks follow below it.
std::string explanation(const config::Settings& settings);

/// Returns the settings that launch passes on to ranks, in one line for each source, which is a file, the environment or flags:
/// "run.yaml: mixed_precision bf16, fsdp_version 2". Leaves out defaults that a file repeats.
std::vector<std::string> origins_of_ranks(const config::Settings& settings);

}  // namespace tessera::cli
