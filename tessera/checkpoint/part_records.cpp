#include "tessera/checkpoint/part_records.h"

#include <ATen/ATen.h>

#include "tessera/shard/rank_range.h"

namespace tessera::checkpoint {
namespace {

PartRecord record_of(at::IntArrayRef shape, at::IntArrayRef strides, const ValueRange& range) {
  return {.shape = shape.vec(), .strides = strides.vec(), .slices = slices_of_range(shape, strides, range.begin, range.numel)};
}

/// Padding ends a shard, which has all its values in the first of its dimensions.
bool is_padded(const at::Tensor& value, const at::Tensor& like, const PartRecord& part) {
  return value.dim() == like.dim() && value.numel() == part.numel() && value.numel() < like.numel();
}

}  // namespace

std::vector<PartRecord> records_of(const Unit& unit, const Unit::Parameter& parameter) {
  std::vector<PartRecord> records;
  for (const int rank : unit.mesh().world().local_ranks()) {
    records.push_back(record_of(parameter.sizes, parameter.strides, range_of_rank(unit.mesh(), parameter.span, rank)));
  }
  return records;
}

std::vector<PartRecord> whole_records(at::IntArrayRef shape, const Communicator& world) {
  const auto strides = c10::contiguous_strides(shape);
  const PartRecord part{.shape = shape.vec(), .strides = {strides.begin(), strides.end()}, .slices = {whole_slice(shape)}};
  return std::vector(world.local_ranks().size(), part);
}

std::vector<PartRecord> records_of_state(const at::Tensor& parameter, const at::Tensor& state, const Communicator& world) {
  const auto found = locate(parameter);
  if (found.parameter == nullptr || state.dim() == 0) return whole_records(state.sizes(), world);
  if (state.sizes() == parameter.sizes()) return records_of(*found.unit, *found.parameter);
  const auto& span = found.parameter->span;
  std::vector<PartRecord> records;
  for (const int rank : world.local_ranks()) records.push_back(record_of({span.numel}, {1}, range_of_rank(found.unit->mesh(), span, rank)));
  return records;
}

std::vector<at::Tensor> values_of_ranks(const at::Tensor& tensor, std::span<const PartRecord> records, const Communicator& world) {
  const bool on_device = tensor.device() == world.traits().device;
  // What lies on the host beside a device is the same for all.
  auto values = on_device ? world.replicas(tensor) : std::vector(records.size(), tensor);
  for (size_t i = 0; i < values.size(); i++) {
    if (values[i].numel() > records[i].numel()) values[i] = values[i].narrow(0, 0, records[i].numel());
  }
  return values;
}

at::Tensor tensor_of_ranks(std::vector<at::Tensor> values, const at::Tensor& like, std::span<const PartRecord> records,
                           const Communicator& world) {
  if (like.device() != world.traits().device) return values.front();
  for (size_t i = 0; i < values.size(); i++) {
    if (!is_padded(values[i], like, records[i])) continue;
    const auto padded = at::zeros(like.sizes(), values[i].options());
    padded.narrow(0, 0, values[i].size(0)).copy_(values[i]);
    values[i] = padded;
  }
  return world.from_replicas(values);
}

at::Tensor state_of_ranks(std::vector<at::Tensor> values, const at::Tensor& parameter, const Communicator& world) {
  const auto found = locate(parameter);
  const auto records = found.parameter != nullptr ? records_of(*found.unit, *found.parameter) : whole_records(parameter.sizes(), world);
  return tensor_of_ranks(std::move(values), parameter, records, world);
}

}  // namespace tessera::checkpoint
