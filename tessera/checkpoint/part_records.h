// From a tensor of this process to what each rank that the process stands for has of it, and back. Nearly always that is one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "tessera/checkpoint/rank_file.h"
#include "tessera/comm/communicator.h"
#include "tessera/shard/local_values.h"

namespace tessera::checkpoint {

/// Where the parts of a sharded parameter belong, in the order of local_ranks(), as everywhere here.
std::vector<PartRecord> records_of(const LocalPart& part);
/// Of a tensor that no rank has only a part of.
std::vector<PartRecord> whole_records(at::IntArrayRef shape, const Communicator& world);
/// Of a tensor that an optimizer keeps for a parameter, sharded or not.
std::vector<PartRecord> records_of_state(const at::Tensor& parameter, const at::Tensor& state, const Communicator& world);

/// What each rank has of a tensor, without padding.
std::vector<at::Tensor> values_of_ranks(const at::Tensor& tensor, std::span<const PartRecord> records, const Communicator& world);
/// Those values as one tensor, with padding again where `like` has some.
at::Tensor tensor_of_ranks(std::vector<at::Tensor> values, const at::Tensor& like, std::span<const PartRecord> records,
                           const Communicator& world);
/// The same for what an optimizer keeps for a parameter.
at::Tensor state_of_ranks(std::vector<at::Tensor> values, const at::Tensor& parameter, const Communicator& world);

}  // namespace tessera::checkpoint
