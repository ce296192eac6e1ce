// Values between the host and the device, and the end of a step.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/xla/device/program_runner.h"

namespace tessera::xla {

/// The end of a step: what has been traced becomes one program, which starts, and the next operator begins the next.
void step_boundary();

/// Every replica's values of a tensor, on the CPU.
std::vector<at::Tensor> replicas(const at::Tensor& tensor);
/// A tensor with these values, a tensor of the CPU for each replica.
at::Tensor from_replicas(const std::vector<at::Tensor>& values);

const Metrics& metrics();

/// Throws UsageError before make_device().
ProgramRunner& runner();
void start_runner(ProgramRunner runner);

}  // namespace tessera::xla
