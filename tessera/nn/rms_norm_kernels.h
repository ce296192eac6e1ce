// The loops of RMSNorm over rows in host memory, of float32 or of bfloat16 (as uint16_t).
#pragma once

#include <cstdint>

namespace tessera::nn {

/// y = x * r * weight for the rows [begin, end), where r is 1 / sqrt(mean of x * x + eps), which is stored for backward.
template <class T>
struct NormForward {
  const T* x;
  const T* weight;
  T* y;
  float* r;
  int64_t size;
  float eps;
};
void run(const NormForward<float>& norm, int64_t begin, int64_t end);
void run(const NormForward<uint16_t>& norm, int64_t begin, int64_t end);

/// The gradient of x, and that of the weight added to `sums`.
template <class T>
struct NormBackward {
  const T* grad;
  const T* x;
  const T* weight;
  const float* r;
  T* grad_x;
  int64_t size;
};
void run(const NormBackward<float>& norm, int64_t begin, int64_t end, float* sums);
void run(const NormBackward<uint16_t>& norm, int64_t begin, int64_t end, float* sums);

}  // namespace tessera::nn
