// Reads the catalog of any file or folder of tensors whose format we know.
#pragma once

#include <filesystem>

#include "tessera/checkpoint/catalog.h"

namespace tessera::checkpoint {

/// `path` is a file, or a folder of files that belong together. Throws IoError if it is neither, or damaged.
Catalog read_catalog(const std::filesystem::path& path);

}  // namespace tessera::checkpoint
