#include "tessera/checkpoint/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {

std::optional<std::string> damage_in(const std::filesystem::path& path, const Communicator& world) {
  std::string own;
  all_or_none(world, {.unit = "checkpoint"}, fmt::format("can't read {}", path.string()), [&] {
    const CatalogReader stored(read_catalog(path));
    const auto& all = stored.catalog().checksums;
    const auto ranks = static_cast<size_t>(world.size());
    for (const int rank : world.local_ranks()) {
      for (auto i = static_cast<size_t>(rank); i < all.size() && own.empty(); i += ranks) {
        if (!stored.is_as_written(all[i])) own = stored.damage(all[i]);
      }
    }
  });
  for (auto& text : world.texts(own, {.unit = "checkpoint"})) {
    if (!text.empty()) return std::move(text);
  }
  return {};
}

Verified verify(const std::filesystem::path& path, const VerifyOptions& options) {
  Verified result;
  const CatalogReader stored(read_catalog(path));
  const auto& catalog = stored.catalog();
  result.files = static_cast<int64_t>(catalog.files.size());
  result.faults = catalog.faults;
  result.without_manifest = is_folder(path) && format_of(path) == Format::Tessera && !is_there(path / kManifestFile);
  std::map<std::pair<size_t, uint64_t>, uint64_t> checked;  // the end of each range of bytes with a checksum, by its file and beginning
  for (const auto& bytes : catalog.checksums) {
    auto& end = checked[{bytes.file, bytes.begin}];
    end = std::max(end, bytes.begin + bytes.bytes);  // an empty tensor begins where the next tensor begins
    if (options.cheap && !is_of_header(bytes)) continue;
    try {
      stored.verify(bytes);
    } catch (const IoError& error) {
      result.faults.emplace_back(error.what());
    }
  }
  const auto is_checked = [&](const StoredBox& stored_box) {
    const auto next = checked.upper_bound({stored_box.file, stored_box.offset});
    if (stored_box.box.numel() == 0) return true;
    return next != checked.begin() && std::prev(next)->first.first == stored_box.file && stored_box.offset < std::prev(next)->second;
  };
  for (const auto& [name, tensor] : catalog.tensors) {
    result.tensors++;
    result.without_checksum += std::ranges::all_of(tensor.boxes, is_checked) ? 0 : 1;
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
