// The random generators and autocast, on which the results of a segment depend beside its inputs and parameters.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <vector>

#include "tessera/base/no_copy.h"

namespace tessera::activation {

/// The CPU and the devices of the tensors, each once.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors);

/// The states of the default random generators of some devices.
class RngState {
 public:
  explicit RngState(const std::vector<c10::Device>& devices);
  void set() const;
  /// States of a trace differ, as far as anyone can tell.
  bool operator==(const RngState& other) const;

 private:
  struct OfDevice {
    at::Generator generator;
    at::Tensor state;
    at::Generator traced;  // in place of the state, where to read it would end a trace
  };
  std::vector<OfDevice> states_;
};

/// Whether and how operators are cast by libtorch's autocast.
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

/// Sets the states of these devices as long as the object exists, and gradients on; then all is as it was.
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
