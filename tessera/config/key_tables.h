// The two halves of the table of keys.
#pragma once

#include <span>

#include "tessera/config/keys.h"

namespace tessera::config {

std::span<const Key> top_keys();
std::span<const Key> section_keys();

}  // namespace tessera::config
