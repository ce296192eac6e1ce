#include "tessera/shard/activation/rng_autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <mutex>

#include "tessera/base/tied.h"

namespace tessera::activation {

RngState::RngState(const std::vector<c10::Device>& devices) {
  for (const auto device : devices) {
    at::Generator generator;
    try {
      generator = at::globalContext().defaultGenerator(device);
    } catch (const c10::Error&) {
      continue;  // a device that draws no random numbers
    }
    const std::lock_guard lock(generator.mutex());
    if (can_tie(device.type())) {
      states_.push_back({.generator = generator, .state = {}, .traced = generator.graphsafe_get_state()});
    } else {
      states_.push_back({.generator = generator, .state = generator.get_state(), .traced = {}});
    }
  }
}

void RngState::set() const {
  for (auto [generator, state, traced] : states_) {
    const std::lock_guard lock(generator.mutex());
    traced.defined() ? generator.graphsafe_set_state(traced) : generator.set_state(state);
  }
}

bool RngState::operator==(const RngState& other) const {
  return std::ranges::equal(states_, other.states_, [](const OfDevice& a, const OfDevice& b) { return !a.traced.defined() && a.state.equal(b.state); });
}

AutocastState::AutocastState(const std::vector<c10::Device>& devices) : caches_(at::autocast::is_autocast_cache_enabled()) {
  for (const auto device : devices) {
    const auto type = device.type();
    devices_.push_back({.type = type, .enabled = at::autocast::is_autocast_enabled(type), .dtype = at::autocast::get_autocast_dtype(type)});
  }
}

void AutocastState::set() const {
  for (const auto& [type, enabled, dtype] : devices_) {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  at::autocast::set_autocast_cache_enabled(caches_);
}

RestoredState::RestoredState(const std::vector<c10::Device>& devices, const std::optional<RngState>& rng, const AutocastState& autocast)
    : autocast_(devices) {
  if (rng) {
    rng_.emplace(devices);
    rng->set();
  }
  at::autocast::increment_nesting();  // so that the destructor clears the cache of autocast
  autocast.set();
}

RestoredState::~RestoredState() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  autocast_.set();
  if (rng_) rng_->set();
}

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices = {at::kCPU};
  for (const auto& tensor : tensors) {
    if (std::ranges::find(devices, tensor.device()) == devices.end()) devices.push_back(tensor.device());
  }
  return devices;
}

}  // namespace tessera::activation
