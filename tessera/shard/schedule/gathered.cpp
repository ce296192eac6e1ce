#include "tessera/shard/schedule/gathered.h"

#include <ATen/ATen.h>

#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"

namespace tessera {

at::Tensor gathered(Unit& unit, const Unit::Group& group, const at::Tensor& own_flat) {
  const auto held = unit.schedule()->lock();
  unit.state(held).expect_equal_start();
  const auto& shard = unit.mesh().shard();
  const auto own = own_flat.to(unit.device());
  const auto whole = at::empty({group.chunk * shard.size()}, own.options());
  const Piece piece{.whole = whole, .own = own};
  shard.all_gather(std::span(&piece, 1), {.unit = unit.name(), .number = unit.number()}).wait();
  return whole;
}

at::Tensor unsharded_view(const at::Tensor& gathered, const Unit::Parameter& parameter) {
  return gathered.as_strided(parameter.sizes, parameter.strides, parameter.span.offset);
}

}  // namespace tessera
