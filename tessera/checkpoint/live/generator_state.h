// The state of a random generator in a checkpoint.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "tessera/checkpoint/stored/manifest.h"

namespace tessera::checkpoint {

/// The generator that a rank has had, or one that no other rank has if fewer ranks have saved; nothing if the checkpoint has none. Throws
/// IoError if its state is none: libtorch would notice only when it is set.
std::optional<at::Generator> read_generator(const CatalogReader& stored, const Manifest& manifest, int rank);

}  // namespace tessera::checkpoint
