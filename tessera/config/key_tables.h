// The table of keys, in two parts. What their names, values and sections say already is added by keys().
#pragma once

#include <vector>

#include "tessera/config/keys.h"

namespace tessera::config {

std::vector<Key> keys_with_effect();
std::vector<Key> keys_without_effect();

}  // namespace tessera::config
