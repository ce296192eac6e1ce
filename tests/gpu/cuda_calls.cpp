#include "cuda_calls.h"

#include <c10/util/Backtrace.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace tessera::testing {
namespace {

std::atomic<bool> watches = false;
std::atomic<int64_t> asked = 0;
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

/// Counts a call, and returns CUDA's own function of that name.
template <class Function>
Function* counted(Function* /*own*/, const char* name) {
  asked++;
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

int64_t requests() {
  return asked;
}

CudaCalls::CudaCalls() {
  const std::lock_guard lock(mutex);
  noted().clear();
  watches = true;
}

CudaCalls::~CudaCalls() {
  watches = false;
}

std::vector<std::string> CudaCalls::calls() const {
  const std::lock_guard lock(mutex);
  return noted();
}

}  // namespace tessera::testing

using tessera::testing::counted;
using tessera::testing::original;

extern "C" {

cudaError_t cudaDeviceSynchronize() {
  return original(&cudaDeviceSynchronize, __func__)();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return original(&cudaStreamSynchronize, __func__)(stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return original(&cudaEventSynchronize, __func__)(event);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return original(&cudaMemcpy, __func__)(to, from, bytes, kind);
}
// It waits until the device has done all that it was told.
cudaError_t cudaFree(void* memory) {
  return original(&cudaFree, __func__)(memory);
}

// The calls that a compiler for GPUs makes of <<<...>>>.
#if CUDART_VERSION >= 13000
#define TESSERA_LAUNCH __cudaLaunchKernel
using Kernel = cudaKernel_t;
#else
#define TESSERA_LAUNCH cudaLaunchKernel
using Kernel = const void*;
#endif
cudaError_t TESSERA_LAUNCH(Kernel kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return counted(&TESSERA_LAUNCH, __func__)(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  return counted(&cudaLaunchKernelExC, __func__)(config, kernel, arguments);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return counted(&cudaMemcpyAsync, __func__)(to, from, bytes, kind, stream);
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  return counted(&cudaMemsetAsync, __func__)(memory, value, bytes, stream);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  return counted(&cudaEventCreateWithFlags, __func__)(event, flags);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return counted(&cudaEventRecord, __func__)(event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags) {
  return counted(&cudaEventRecordWithFlags, __func__)(event, stream, flags);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return counted(&cudaEventQuery, __func__)(event);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  return counted(&cudaStreamWaitEvent, __func__)(stream, event, flags);
}

}  // extern "C"
