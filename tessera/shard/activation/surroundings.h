// Surroundings: what the results of a segment depend on beside its inputs and parameters, as they were when it first ran.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::activation {

/// The states of the default random generators of some devices.
class RandomStates {
 public:
  explicit RandomStates(const std::vector<c10::Device>& devices);
  void set() const;
  bool operator==(const RandomStates& other) const;
  std::vector<c10::Device> devices() const;

 private:
  struct State {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<State> states_;
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

/// The CPU and the devices of the tensors, each once.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors);

}  // namespace tessera::activation
