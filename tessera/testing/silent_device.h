// A device without hardware, for what the core must not do on a device that it can't look into: every address that it hands out is one of
// unreadable pages, and each tensor stands for kReplicas values, one for each rank, as on an engine that traces one program for all.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::testing {

inline constexpr int kReplicas = 4;

/// Registers the device when it is first asked for, which has to be before the first backward pass of the process: the autograd engine
/// counts the devices once. Operators run on the CPU, once for each replica.
at::Device silent_device();

/// A tensor on the device, of one value on the host for each replica.
at::Tensor upload(std::span<const at::Tensor> values);
/// The values of all replicas, on the host.
std::vector<at::Tensor> download(const at::Tensor& tensor);
/// Moves parameters and buffers, all replicas alike: Module::to is for devices that libtorch knows.
void move_to_silent_device(const torch::nn::Module& module);

/// What the device's own kernels see of a tensor: one replica's value as a CPU tensor over the same memory.
at::Tensor replica(const at::Tensor& tensor, int index);

/// How often the host has asked for a value of the device: item(), copies to the CPU, operators that return no tensor.
int host_reads();

}  // namespace tessera::testing
