#include "tessera/shard/unit/fingerprint.h"

#include <ATen/ATen.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/comm/simulation.h"

namespace tessera {

uint64_t fingerprint(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t fingerprint(const at::Tensor& values) {
  if (Simulation::current() != nullptr) return 0;
  const auto here = values.cpu().contiguous();
  return XXH3_64bits(here.const_data_ptr(), here.nbytes());
}

}  // namespace tessera
