// The texts of `tessera config explain` and of launch about settings.
#pragma once

#include <string>
#include <vector>

#include "tessera/config/settings.h"

namespace tessera::cli {

/// A table of all keys that matter: value and where it comes from. Remarks stand below.
std::string explanation(const config::Settings& settings);

/// One line for each source, which is a file, the environment or flags, of what it tells ranks: "run.yaml: mixed_precision bf16,
/// fsdp_version 2". Defaults that a file repeats are left out.
std::vector<std::string> origins_of_ranks(const config::Settings& settings);

}  // namespace tessera::cli
