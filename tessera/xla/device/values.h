// Moves values between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/xla/device/program_runner.h"
#include "tessera/xla/training.h"

namespace tessera::xla {

/// Returns every replica's values on the CPU. `reader` names the read in the warning that it splits a step; if empty, there is no warning.
std::vector<at::Tensor> replicas(const at::Tensor& tensor, const std::string& reader = "replicas()");
/// Returns only the first replica's values, because all replicas have the same ones, or because the caller does not need the others.
at::Tensor first_replica(const at::Tensor& tensor, const std::string& reader);
/// Makes a tensor of CPU tensors, one for each replica or one for all.
at::Tensor from_replicas(const std::vector<at::Tensor>& values);

bool has_device();
/// Throws UsageError before init().
ProgramRunner& runner();
void start_runner(ProgramRunner runner);

}  // namespace tessera::xla
