// A device without hardware, for tests that the core does not read device memory on the host: all its addresses are unreadable pages. Each
// tensor stands for kReplicas values, one for each rank, as with a transport that traces one program for all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::testing {

inline constexpr int kReplicas = 4;

/// The first call registers the device. It must come before the first backward pass of the process, because the autograd engine counts
/// devices only once. Operators run on the CPU, once for each replica.
at::Device silent_device();

/// Makes a tensor on the device from host tensors, one for each replica.
at::Tensor upload(std::span<const at::Tensor> values);
/// Copies the values of all replicas to the host.
std::vector<at::Tensor> download(const at::Tensor& tensor);
/// Moves parameters and buffers to the device, with the same values for all replicas. Module::to works only for devices that libtorch
/// knows.
void move_to_silent_device(const torch::nn::Module& module);

/// One replica's value of a tensor, as a CPU tensor over the same memory. The device's kernels work on such tensors.
at::Tensor replica(const at::Tensor& tensor, int index);

/// How often the host has read a value of the device: by item(), copies to the CPU, and operators that do not return a tensor.
int host_reads();

}  // namespace tessera::testing
