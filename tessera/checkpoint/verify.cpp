#include "tessera/checkpoint/verify.h"

#include "tessera/base/error.h"
#include "tessera/checkpoint/catalogs.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

Verified verify(const std::filesystem::path& path, const VerifyOptions& options) {
  Verified result;
  const CatalogReader stored(read_catalog(path));
  const auto& catalog = stored.catalog();
  result.files = static_cast<int64_t>(catalog.files.size());
  std::set<std::string> with_checksum;
  for (const auto& bytes : catalog.checksums) {
    with_checksum.insert(bytes.name);
    if (options.cheap && bytes.name != kHeaderName) continue;
    try {
      stored.verify(bytes);
    } catch (const IoError& error) {
      result.faults.emplace_back(error.what());
    }
  }
  for (const auto& [name, tensor] : catalog.tensors) {
    result.tensors++;
    result.without_checksum += with_checksum.contains(name) ? 0 : 1;
    for (const auto& stored_box : tensor.boxes)
      result.bytes += stored_box.box.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    try {
      stored.expect_complete(name);
    } catch (const IoError& error) {
      result.faults.emplace_back(error.what());
    }
  }
  return result;
}

}  // namespace tessera::checkpoint
