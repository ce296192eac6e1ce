#include "tessera/checkpoint/catalogs.h"

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

Catalog read_catalog(const fs::path& path) {
  std::error_code unknown;
  if (fs::is_directory(path, unknown)) return read_manifest(path).catalog;
  Catalog catalog;
  add_safetensors(catalog, SafetensorsFile(path));
  return catalog;
}

}  // namespace tessera::checkpoint
