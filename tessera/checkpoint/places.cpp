#include "tessera/checkpoint/places.h"

#include <ATen/ATen.h>

#include "tessera/shard/rank_range.h"

namespace tessera::checkpoint {
namespace {

PartPlace place_of(at::IntArrayRef shape, at::IntArrayRef strides, const ValueRange& range) {
  return {.shape = shape.vec(), .strides = strides.vec(), .slices = slices_of_range(shape, strides, range.begin, range.numel)};
}

/// Padding ends a shard, which has all its values in the first of its dimensions.
bool is_padded(const at::Tensor& value, const at::Tensor& like, const PartPlace& place) {
  return value.dim() == like.dim() && value.numel() == place.numel() && value.numel() < like.numel();
}

}  // namespace

std::vector<PartPlace> places_of(const Unit& unit, const Unit::Parameter& parameter) {
  std::vector<PartPlace> places;
  for (const int rank : unit.mesh().world().local_ranks()) {
    places.push_back(place_of(parameter.sizes, parameter.strides, range_of_rank(unit.mesh(), parameter.span, rank)));
  }
  return places;
}

std::vector<PartPlace> whole_places(at::IntArrayRef shape, const Communicator& world) {
  const auto strides = c10::contiguous_strides(shape);
  const PartPlace place{.shape = shape.vec(), .strides = {strides.begin(), strides.end()}, .slices = {whole_slice(shape)}};
  return std::vector(world.local_ranks().size(), place);
}

std::vector<PartPlace> places_of_state(const at::Tensor& parameter, const at::Tensor& state, const Communicator& world) {
  const auto found = locate(parameter);
  if (found.parameter == nullptr || state.dim() == 0) return whole_places(state.sizes(), world);
  if (state.sizes() == parameter.sizes()) return places_of(*found.unit, *found.parameter);
  const auto& span = found.parameter->span;
  std::vector<PartPlace> places;
  for (const int rank : world.local_ranks()) places.push_back(place_of({span.numel}, {1}, range_of_rank(found.unit->mesh(), span, rank)));
  return places;
}

std::vector<at::Tensor> values_of_ranks(const at::Tensor& tensor, std::span<const PartPlace> places, const Communicator& world) {
  const bool on_device = tensor.device() == world.traits().device;
  // What lies on the host beside a device is the same for all.
  auto values = on_device ? world.replicas(tensor) : std::vector(places.size(), tensor);
  for (size_t i = 0; i < values.size(); i++) {
    if (values[i].numel() > places[i].numel()) values[i] = values[i].narrow(0, 0, places[i].numel());
  }
  return values;
}

at::Tensor tensor_of_ranks(std::vector<at::Tensor> values, const at::Tensor& like, std::span<const PartPlace> places,
                           const Communicator& world) {
  if (like.device() != world.traits().device) return values.front();
  for (size_t i = 0; i < values.size(); i++) {
    if (!is_padded(values[i], like, places[i])) continue;
    const auto padded = at::zeros(like.sizes(), values[i].options());
    padded.narrow(0, 0, values[i].size(0)).copy_(values[i]);
    values[i] = padded;
  }
  return world.from_replicas(values);
}

at::Tensor state_of_ranks(std::vector<at::Tensor> values, const at::Tensor& parameter, const Communicator& world) {
  const auto found = locate(parameter);
  const auto places = found.parameter != nullptr ? places_of(*found.unit, *found.parameter) : whole_places(parameter.sizes(), world);
  return tensor_of_ranks(std::move(values), parameter, places, world);
}

}  // namespace tessera::checkpoint
