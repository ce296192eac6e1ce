// Values between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/xla/device/program_runner.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Every replica's values of a tensor, on the CPU. `reader` is whom a warning names if the read cuts a step; nobody if it is empty.
std::vector<at::Tensor> replicas(const at::Tensor& tensor, const std::string& reader = "replicas()");
/// The same of one replica, where all have the same values or nobody asks for the others.
at::Tensor first_replica(const at::Tensor& tensor, const std::string& reader);
/// A tensor with these values, a tensor of the CPU for each replica.
at::Tensor from_replicas(const std::vector<at::Tensor>& values);

bool has_device();
/// Throws UsageError before init().
ProgramRunner& runner();
void start_runner(ProgramRunner runner);

}  // namespace tessera::xla
