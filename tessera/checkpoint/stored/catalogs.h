// Reads checkpoints and weights of all formats that we know.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/checkpoint/format.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/places.h"

namespace tessera::checkpoint {

/// Whether a file has a name of one that is of no use without the others in its folder.
bool is_part(const std::filesystem::path& file);

/// Reads all that a checkpoint holds.
Catalog read_catalog(const std::filesystem::path& path);
/// The most steps that the optimizer's state has counted for a parameter, as Adam's does; 0 if it does not count.
int64_t steps_of_optimizer(const std::filesystem::path& path);

/// Reads only the model, under its own names: without the optimizer's state, and without the key "model" under which programs put the model
/// beside other things. The model's names, if they are known, tell where it lies.
Catalog read_model(const std::filesystem::path& path, const ModelNames& names = {});

}  // namespace tessera::checkpoint
