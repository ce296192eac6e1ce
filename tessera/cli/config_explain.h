// What `tessera config explain` prints.
#pragma once

#include <string>

#include "tessera/config/settings.h"

namespace tessera::cli {

/// A table of all keys that matter: value and where it comes from. Remarks stand below.
std::string explanation(const config::Settings& settings);

}  // namespace tessera::cli
