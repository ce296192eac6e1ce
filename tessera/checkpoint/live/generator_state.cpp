#include "tessera/checkpoint/live/generator_state.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/live/model_plan.h"

namespace tessera::checkpoint {

std::optional<at::Generator> read_generator(const CatalogReader& stored, const Manifest& manifest, int rank) {
  if (manifest.generator.empty()) return std::nullopt;
  const auto& info = stored.info(manifest.generator);
  if (info.boxes.empty()) return std::nullopt;
  const auto state = at::empty(info.shape, info.dtype);
  const auto file = info.boxes[static_cast<size_t>(rank) % info.boxes.size()].file;  // one box for each rank, whatever other files there are
  stored.read(manifest.generator, whole_slice(info.shape), state, file);
  auto generator = at::detail::createCPUGenerator();
  try {
    generator.set_state(state);
  } catch (const std::exception& error) {
    throw IoError(
        fmt::format("the state of the random generator in {} is damaged: {}", stored.catalog().files[file].string(), first_line(error)));
  }
  if (rank >= manifest.ranks) {
    const auto drawn = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
    generator.set_current_seed(drawn + static_cast<uint64_t>(rank));
  }
  return generator;
}

}  // namespace tessera::checkpoint
