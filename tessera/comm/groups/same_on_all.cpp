#include "tessera/comm/groups/same_on_all.h"

#include <ATen/ATen.h>

#include <bit>

namespace tessera {

bool same_on_all(const Communicator& world, uint64_t number, Subject subject) {
  // The complement has the largest value where the number has its smallest.
  const auto own = std::bit_cast<int64_t>(number);
  const auto range = at::tensor({own, ~own}, at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.all_reduce(range, {.op = Reduce::Max}, subject).wait();
  return range[0].item<int64_t>() == ~range[1].item<int64_t>();
}

}  // namespace tessera
