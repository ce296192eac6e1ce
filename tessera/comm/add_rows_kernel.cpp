#include "tessera/comm/add_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "tessera/base/kernel.h"

namespace tessera {
namespace {

constexpr int64_t kStretch = 4096;  // values: a stretch of sums stays in the first cache while row after row is added
constexpr int64_t kGrain = 1 << 16;

float value(float number) {
  return number;
}

float value(uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<uint32_t>(bfloat) << 16);
}

template <class T>
[[gnu::always_inline]] inline void add_two(const T* first, const T* second, float divisor, float* result, int64_t count) {
#pragma GCC ivdep  // the result may be a row, value for value
  for (int64_t i = 0; i < count; i++) result[i] = (value(first[i]) + value(second[i])) / divisor;
}

template <class T>
[[gnu::always_inline]] inline void take_one(const T* row, float* sum, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) sum[i] = value(row[i]);
}

template <class T>
[[gnu::always_inline]] inline void add_one(const T* row, float* sum, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) sum[i] += value(row[i]);
}

template <class T>
[[gnu::always_inline]] inline void add_stretch(const T* const* rows, int64_t ranks, int64_t begin, int64_t count, float divisor,
                                               float* result) {
  if (ranks == 2) return add_two(rows[0] + begin, rows[1] + begin, divisor, result + begin, count);
  // Not in the result itself, which may be one of the rows.
  std::array<float, kStretch> sum;
  take_one(rows[0] + begin, sum.data(), count);
  for (int64_t rank = 1; rank < ranks; rank++) add_one(rows[rank] + begin, sum.data(), count);
#pragma GCC ivdep
  for (int64_t i = 0; i < count; i++) result[begin + i] = sum[static_cast<size_t>(i)] / divisor;
}

TESSERA_KERNEL void add_floats(const float* const* rows, int64_t ranks, int64_t begin, int64_t count, float divisor, float* result) {
  add_stretch(rows, ranks, begin, count, divisor, result);
}

TESSERA_KERNEL void add_bfloats(const uint16_t* const* rows, int64_t ranks, int64_t begin, int64_t count, float divisor, float* result) {
  add_stretch(rows, ranks, begin, count, divisor, result);
}

template <class T, class Add>
void in_stretches(std::span<const at::Tensor> rows, const at::Tensor& result, float divisor, const Add& add) {
  std::vector<const T*> pointers;
  for (const auto& row : rows) pointers.push_back(static_cast<const T*>(row.const_data_ptr()));
  auto* const target = result.data_ptr<float>();
  at::parallel_for(0, result.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kStretch) {
      add(pointers.data(), std::ssize(pointers), begin, std::min(kStretch, end - begin), divisor, target);
    }
  });
}

}  // namespace

bool add_rows(std::span<const at::Tensor> rows, const at::Tensor& result, float divisor) {
  const auto dtype = rows.front().scalar_type();
  const auto fits = [&](const at::Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_contiguous(); };
  if (!fits(result) || !std::ranges::all_of(rows, fits)) return false;
  if (dtype == at::kFloat) {
    in_stretches<float>(rows, result, divisor, add_floats);
  } else if (dtype == at::kBFloat16) {
    in_stretches<uint16_t>(rows, result, divisor, add_bfloats);
  } else {
    return false;
  }
  return true;
}

}  // namespace tessera
