#include "host_waits.h"

#include <c10/util/Backtrace.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace tessera::testing {
namespace {

std::atomic<bool> watches = false;
std::mutex mutex;

std::vector<std::string>& noted() {
  static auto* const all = new std::vector<std::string>;
  return *all;
}

/// Notes a call, and returns CUDA's own function of that name.
template <class Function>
Function* original(Function* /*own*/, const char* name) {
  if (watches) {
    const std::lock_guard lock(mutex);
    noted().push_back(std::string(name) + "\n" + c10::get_backtrace(/*frames_to_skip=*/2, /*maximum_number_of_frames=*/24));
  }
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

HostWaits::HostWaits() {
  const std::lock_guard lock(mutex);
  noted().clear();
  watches = true;
}

HostWaits::~HostWaits() {
  watches = false;
}

std::vector<std::string> HostWaits::calls() const {
  const std::lock_guard lock(mutex);
  return noted();
}

}  // namespace tessera::testing

using tessera::testing::original;

extern "C" {

cudaError_t cudaDeviceSynchronize() {
  return original(&cudaDeviceSynchronize, "cudaDeviceSynchronize")();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return original(&cudaStreamSynchronize, "cudaStreamSynchronize")(stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return original(&cudaEventSynchronize, "cudaEventSynchronize")(event);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return original(&cudaMemcpy, "cudaMemcpy")(to, from, bytes, kind);
}
// It waits until the device has done all that it was told.
cudaError_t cudaFree(void* memory) {
  return original(&cudaFree, "cudaFree")(memory);
}

}  // extern "C"
