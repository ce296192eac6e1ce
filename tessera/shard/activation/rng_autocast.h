// Saves and restores the states of random generators and of autocast, because the results of a segment depend on them, too.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <vector>

#include "tessera/base/no_copy.h"

namespace tessera::activation {

/// Returns the CPU and the devices of the tensors, each once.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors);

/// The states of the default random generators of some devices.
class RngState {
 public:
  explicit RngState(const std::vector<c10::Device>& devices);
  void set() const;
  /// States in a trace can't be read, and count as different.
  bool operator==(const RngState& other) const;

 private:
  struct OfDevice {
    at::Generator generator;
    at::Tensor state;
    at::Generator traced;  // used in place of `state` on devices where reading the state would end a trace
  };
  std::vector<OfDevice> states_;
};

/// Whether libtorch's autocast is enabled, and to which dtypes it casts.
class AutocastState {
 public:
  explicit AutocastState(const std::vector<c10::Device>& devices);
  void set() const;

 private:
  struct OfDevice {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<OfDevice> devices_;
  bool caches_;
};

/// As long as it exists, the devices have the given states, and gradients are enabled. Its end restores the previous states.
class RestoredState : NoCopy {
 public:
  RestoredState(const std::vector<c10::Device>& devices, const std::optional<RngState>& rng, const AutocastState& autocast);
  ~RestoredState();

 private:
  const AutocastState autocast_;
  std::optional<RngState> rng_;
  const c10::AutoGradMode grad_{true};
};

}  // namespace tessera::activation
