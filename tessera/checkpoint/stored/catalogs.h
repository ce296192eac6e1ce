// Reads checkpoints and weights of all formats that Tessera knows.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/checkpoint/format.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/places.h"

namespace tessera::checkpoint {

/// Whether the name of a file shows that it is of no use without the other files in its folder.
bool is_part(const std::filesystem::path& file);

/// Reads all that a checkpoint holds.
Catalog read_catalog(const std::filesystem::path& path);
/// Returns the largest step count of a parameter in the optimizer's state; 0 if the state counts no steps.
int64_t steps_of_optimizer(const std::filesystem::path& path);

/// Reads only the model, without the optimizer's state. Removes from names a key such as "model", under which programs save the model
/// beside other things. If the caller knows the model's names, `names` help to find the model in the file.
Catalog read_model(const std::filesystem::path& path, const ModelNames& names = {});

}  // namespace tessera::checkpoint
