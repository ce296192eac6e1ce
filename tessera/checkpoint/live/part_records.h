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

/// The part of a tensor that is this range of its values in memory order.
PartRecord record_of(at::IntArrayRef shape, at::IntArrayRef strides, const ValueRange& range);
/// The part of a sharded parameter that each rank has.
std::vector<PartRecord> records_of(const LocalPart& part);
/// All of a tensor.
PartRecord whole_record(at::IntArrayRef shape);
/// The same as records_of for a tensor that is not sharded: each rank has all of it.
std::vector<PartRecord> whole_records(at::IntArrayRef shape, const Communicator& world);
/// is_of_blocks(): whether, by its key, a tensor of optimizer state has one value for each block of a DynamicCode. record_of_blocks(): the
/// part of such a tensor for a range of the parameter's values that begins with a block.
bool is_of_blocks(std::string_view key);
PartRecord record_of_blocks(const ShardInfo& info, const ValueRange& range);
/// The same as records_of for a tensor of the optimizer's state for a parameter, which may be sharded or not.
std::vector<PartRecord> records_of_state(const at::Tensor& parameter, std::string_view key, const at::Tensor& state,
                                         const Communicator& world);

/// The values that each rank has of a tensor, without padding.
std::vector<at::Tensor> values_of_ranks(const at::Tensor& tensor, std::span<const PartRecord> records, const Communicator& world);
/// The reverse of values_of_ranks(): one tensor from the values of all ranks. It is padded to the size of `like`.
at::Tensor tensor_of_ranks(std::vector<at::Tensor> values, const at::Tensor& like, std::span<const PartRecord> records,
                           const Communicator& world);
/// The same for the values that `read` copies, for each rank, to a flat tensor of this dtype on the host.
at::Tensor read_for_ranks(const at::Tensor& like, std::span<const PartRecord> records, at::ScalarType dtype, const Communicator& world,
                          c10::function_ref<void(const PartRecord& record, const at::Tensor& flat, int rank)> read);
/// The same for a tensor of the optimizer's state for a parameter.
at::Tensor state_of_ranks(std::vector<at::Tensor> values, const at::Tensor& parameter, const Communicator& world);

}  // namespace tessera::checkpoint
