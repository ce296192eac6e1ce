// Reads checkpoints and weights of all formats that we know.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/checkpoint/format.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/places.h"

namespace tessera::checkpoint {

/// Whether a file has a name of those that say nothing without the others in their folder.
bool is_part(const std::filesystem::path& file);

/// All that a checkpoint holds.
Catalog read_catalog(const std::filesystem::path& path);
/// How many steps the state of the optimizer has counted, as that of Adam has for each parameter; 0 if it has not.
int64_t steps_of_optimizer(const std::filesystem::path& path);

/// Only the model of it, under the model's own names: without the optimizer's state, and without the key "model" under which programs put
/// the model beside other things. The names of the model, if they are known, tell where it lies.
Catalog read_model(const std::filesystem::path& path, const ModelNames& names = {});

}  // namespace tessera::checkpoint
