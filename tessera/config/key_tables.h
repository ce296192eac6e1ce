// The table of keys, in two parts. keys() adds what follows from their names and values.
#pragma once

#include <vector>

#include "tessera/config/keys.h"

namespace tessera::config {

std::vector<Key> keys_with_effect();
std::vector<Key> keys_without_effect();

}  // namespace tessera::config
