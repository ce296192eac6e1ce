// The device `xla`: what programs call to have one, and to talk to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/xla/device/values.h"

namespace torch::nn {
class Module;
}

namespace tessera::xla {

struct XlaOptions {
  /// Replicas of every tensor, each with its own values, on a device of its own.
  int devices = 1;
  /// A plugin's name or path; TESSERA_PJRT_PLUGIN or "cpu" if empty.
  std::string plugin = {};
};

/// Makes the device, once in a process, before its first backward pass: libtorch counts devices only once.
at::Device make_device(const XlaOptions& options = {});
/// Moves parameters and buffers to the device, as Module::to does for devices that libtorch knows.
void to_device(const torch::nn::Module& module);

}  // namespace tessera::xla
