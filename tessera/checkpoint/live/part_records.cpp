#include "tessera/checkpoint/live/part_records.h"

#include <ATen/ATen.h>

#include "tessera/base/dynamic_code.h"

namespace tessera::checkpoint {
namespace {

std::vector<PartRecord> records_of_ranges(at::IntArrayRef shape, at::IntArrayRef strides, const std::vector<ValueRange>& ranges) {
  std::vector<PartRecord> records;
  for (const auto& range : ranges) records.push_back(record_of(shape, strides, range));
  return records;
}

int64_t blocks_of(int64_t numel) {
  return (numel + DynamicCode::kBlock - 1) / DynamicCode::kBlock;
}

/// Whether `like` is a shard with padding that the value lacks. A shard has its padding at the end of the first dimension.
bool is_padded(const at::Tensor& value, const at::Tensor& like, const PartRecord& part) {
  return value.dim() == like.dim() && value.numel() == part.numel() && value.numel() < like.numel();
}

}  // namespace

PartRecord record_of(at::IntArrayRef shape, at::IntArrayRef strides, const ValueRange& range) {
  return {.shape = shape.vec(), .strides = strides.vec(), .slices = slices_of_range(shape, strides, range.begin, range.numel)};
}

std::vector<PartRecord> records_of(const LocalPart& part) {
  return records_of_ranges(part.shape, part.strides, part.ranges);
}

PartRecord whole_record(at::IntArrayRef shape) {
  const auto strides = c10::contiguous_strides(shape);
  return {.shape = shape.vec(), .strides = {strides.begin(), strides.end()}, .slices = {whole_slice(shape)}};
}

std::vector<PartRecord> whole_records(at::IntArrayRef shape, const Communicator& world) {
  return std::vector(world.local_ranks().size(), whole_record(shape));
}

bool is_of_blocks(std::string_view key) {
  return key.ends_with("_scales");
}

PartRecord record_of_blocks(const ShardInfo& info, const ValueRange& range) {
  const int64_t shape[] = {blocks_of(c10::multiply_integers(info.shape))}, strides[] = {1};
  return record_of(shape, strides, {.begin = range.begin / DynamicCode::kBlock, .numel = blocks_of(range.numel)});
}

std::vector<PartRecord> records_of_state(const at::Tensor& parameter, std::string_view key, const at::Tensor& state,
                                         const Communicator& world) {
  const auto info = shard_info(parameter);
  if (!info || state.dim() == 0) return whole_records(state.sizes(), world);
  if (!is_of_blocks(key)) return records_of_ranges(info->shape, info->strides, info->ranges);
  std::vector<PartRecord> records;
  for (const auto& range : info->ranges) records.push_back(record_of_blocks(*info, range));
  return records;
}

std::vector<at::Tensor> values_of_ranks(const at::Tensor& tensor, std::span<const PartRecord> records, const Communicator& world) {
  const bool on_device = tensor.device() == world.traits().device;
  // A tensor on the host has the same values for all ranks of the device.
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

at::Tensor read_for_ranks(const at::Tensor& like, std::span<const PartRecord> records, at::ScalarType dtype, const Communicator& world,
                          c10::function_ref<void(const PartRecord& record, const at::Tensor& flat, int rank)> read) {
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < records.size(); i++) {
    auto& own = values.emplace_back(at::empty({records[i].numel()}, at::TensorOptions(at::kCPU).dtype(dtype)));
    read(records[i], own, world.local_ranks()[i]);
    if (own.numel() == like.numel()) own = own.view(like.sizes());
  }
  return tensor_of_ranks(std::move(values), like, records, world);
}

at::Tensor state_of_ranks(std::vector<at::Tensor> values, const at::Tensor& parameter, const Communicator& world) {
  const auto info = shard_info(parameter);
  const auto records = info ? records_of_ranges(info->shape, info->strides, info->ranges) : whole_records(parameter.sizes(), world);
  return tensor_of_ranks(std::move(values), parameter, records, world);
}

}  // namespace tessera::checkpoint
