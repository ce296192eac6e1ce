#include "tessera/checkpoint/consolidate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/checkpoint/rank_file.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {

Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path) {
  std::error_code unknown;  // what can't be found out is no reason to refuse
  const auto parent = std::filesystem::weakly_canonical(save_path, unknown).parent_path();
  if (!unknown && parent == std::filesystem::weakly_canonical(folder, unknown)) {
    throw UsageError(fmt::format("{} lies in the checkpoint itself, whose files it could replace; save it elsewhere", save_path.string()));
  }
  const auto manifest = read_manifest(folder);
  const CatalogReader stored(manifest.catalog);
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : manifest.catalog.tensors) {
    if (name == kGeneratorName || is_optimizer_state(name, manifest)) continue;
    stored.expect_complete(name);  // before anything is written
    entries.push_back({.name = name, .dtype = tensor.dtype, .sizes = tensor.shape});
  }
  std::ranges::stable_sort(entries, std::greater{}, [](const SafetensorsEntry& entry) { return c10::elementSize(entry.dtype); });
  for (const auto& bytes : manifest.catalog.checksums) {
    if (!is_optimizer_state(bytes.name, manifest)) stored.verify(bytes);
  }

  Consolidated result;
  auto metadata = manifest.catalog.aliases;
  metadata["format"] = "pt";
  SafetensorsWriter writer(save_path, entries, metadata);
  for (const auto& entry : entries) {
    const bool is_buffer = std::ranges::find(manifest.buffers, entry.name) != manifest.buffers.end();
    if (!is_buffer) result.parameters += c10::multiply_integers(entry.sizes);
    result.tensors++;
    result.bytes += entry.bytes();
    writer.write(stored.read(entry.name));
  }
  writer.close();
  return result;
}

Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path, const Communicator& world) {
  Consolidated result;
  const auto together = [&](c10::function_ref<void()> act) {
    AllOrNone step;
    step.attempt(act);
    step.expect_all(world, {.unit = "consolidation"}, fmt::format("could not consolidate {}", folder.string()));
  };
  together([&] {
    if (world.is_first()) result = consolidate(folder, save_path);
  });
  together([&] {
    if (is_there(save_path)) return;
    throw IoError(fmt::format(
        "{}, which rank 0 has written, is not there for another rank; give all ranks the same path, where all see the same files",
        save_path.string()));
  });
  const auto numbers = at::tensor({result.parameters, result.tensors, result.bytes}, at::kLong).to(world.traits().device);
  world.broadcast(numbers, 0, {.unit = "consolidation"}).wait();
  const auto known = numbers.cpu();
  const auto* const values = known.const_data_ptr<int64_t>();
  return {.parameters = values[0], .tensors = values[1], .bytes = values[2]};
}

}  // namespace tessera::checkpoint
