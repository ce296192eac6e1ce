// Splits a tensor of this process into the parts of the ranks that the process represents, and joins such parts again. A process represents
// one rank, unless its transport traces. All lists here have one entry for each local rank, in the order of local_ranks().
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <span>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/comm/communicator.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {

/// Returns the part of a tensor that is this range of its values in memory order.
PartRecord record_of(at::IntArrayRef shape, at::IntArrayRef strides, const ValueRange& range);
/// Returns the part of a sharded parameter that each rank has.
std::vector<PartRecord> records_of(const LocalPart& part);
/// Returns the record of a whole tensor.
PartRecord whole_record(at::IntArrayRef shape);
/// The same as records_of for a tensor that is not sharded: each rank has all of it.
std::vector<PartRecord> whole_records(at::IntArrayRef shape, const Communicator& world);
/// Whether optimizer state under this key has one value for each block of a DynamicCode, as the scales of quantized state have.
bool is_of_blocks(std::string_view key);
/// Returns the part of such a tensor that belongs to a range of the parameter's values. The range must begin where a block begins.
PartRecord record_of_blocks(const ShardInfo& info, const ValueRange& range);
/// The same as records_of for a tensor of the optimizer's state for a parameter, which may be sharded or not.
std::vector<PartRecord> records_of_state(const at::Tensor& parameter, std::string_view key, const at::Tensor& state,
                                         const Communicator& world);

/// Returns the values that each rank has of a tensor, without padding.
std::vector<at::Tensor> values_of_ranks(const at::Tensor& tensor, std::span<const PartRecord> records, const Communicator& world);
/// Reverses values_of_ranks(): makes one tensor of the values of all ranks, padded to the size of `like`.
at::Tensor tensor_of_ranks(std::vector<at::Tensor> values, const at::Tensor& like, std::span<const PartRecord> records,
                           const Communicator& world);
/// Like tensor_of_ranks(), but takes the values from `read`, which copies each rank's values to a flat tensor of this dtype on the host.
at::Tensor read_for_ranks(const at::Tensor& like, std::span<const PartRecord> records, at::ScalarType dtype, const Communicator& world,
                          c10::function_ref<void(const PartRecord& record, const at::Tensor& flat, int rank)> read);
/// Like tensor_of_ranks(), for a tensor of the optimizer's state for a parameter.
at::Tensor state_of_ranks(std::vector<at::Tensor> values, const at::Tensor& parameter, const Communicator& world);

}  // namespace tessera::checkpoint
