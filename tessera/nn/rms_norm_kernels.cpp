#include "tessera/nn/rms_norm_kernels.h"

#include <cmath>

#include "tessera/base/kernel.h"
#include "tessera/nn/rows.h"

namespace tessera::nn {
namespace {

template <class T>
[[gnu::always_inline]] inline void forward_rows(const NormForward<T>& norm, int64_t begin, int64_t end) {
  const auto size = norm.size;
  const T* const weight = norm.weight;
  for (auto row = begin; row < end; row++) {
    const T* const x = norm.x + row * size;
    T* const y = norm.y + row * size;
    const float squares = sum_of(size, [&](int64_t i) __attribute__((always_inline)) { return to_float(x[i]) * to_float(x[i]); });
    const float r = 1 / std::sqrt(squares / static_cast<float>(size) + norm.eps);
    norm.r[row] = r;
#pragma GCC ivdep
    for (int64_t i = 0; i < size; i++) store(y[i], to_float(x[i]) * r * to_float(weight[i]));
  }
}

template <class T>
[[gnu::always_inline]] inline void backward_rows(const NormBackward<T>& norm, int64_t begin, int64_t end, float* const sums) {
  const auto size = norm.size;
  const T* const weight = norm.weight;
  for (auto row = begin; row < end; row++) {
    const T* const x = norm.x + row * size;
    const T* const grad = norm.grad + row * size;
    T* const grad_x = norm.grad_x + row * size;
    const float r = norm.r[row];
    const float along =
        sum_of(size, [&](int64_t i) __attribute__((always_inline)) { return to_float(grad[i]) * to_float(weight[i]) * to_float(x[i]); });
    const float common = along * r * r / static_cast<float>(size);
#pragma GCC ivdep
    for (int64_t i = 0; i < size; i++) {
      const float g = to_float(grad[i]), value = to_float(x[i]);
      sums[i] += g * value * r;
      store(grad_x[i], r * (g * to_float(weight[i]) - value * common));
    }
  }
}

}  // namespace

TESSERA_KERNEL void run(const NormForward<float>& norm, int64_t begin, int64_t end) {
  forward_rows(norm, begin, end);
}
TESSERA_KERNEL void run(const NormForward<uint16_t>& norm, int64_t begin, int64_t end) {
  forward_rows(norm, begin, end);
}
TESSERA_KERNEL void run(const NormBackward<float>& norm, int64_t begin, int64_t end, float* sums) {
  backward_rows(norm, begin, end, sums);
}
TESSERA_KERNEL void run(const NormBackward<uint16_t>& norm, int64_t begin, int64_t end, float* sums) {
  backward_rows(norm, begin, end, sums);
}

}  // namespace tessera::nn
