// Folders of NumPy's files as catalogs: each NAME.npy is the tensor NAME.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// Whether the folder has such files.
bool is_npy_folder(const std::filesystem::path& folder);
/// Throws IoError, with the name of the file, for what is no array of numbers that libtorch has.
Catalog read_npy_folder(const std::filesystem::path& folder);

}  // namespace tessera::checkpoint
