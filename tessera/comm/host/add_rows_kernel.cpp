// Adds rows in host memory, the loop in which reductions spend their time.
#include "tessera/comm/host/add_rows.h"

#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <numeric>

#include "tessera/base/kernel.h"

namespace tessera {
namespace {

constexpr int64_t kBlock = 4096;  // values: the sums of a block stay in the L1 cache while row after row is added
constexpr int64_t kGrain = 1 << 16;

float value(float number) {
  return number;
}

float value(uint16_t bfloat) {
  return std::bit_cast<float>(static_cast<uint32_t>(bfloat) << 16);
}

template <class T>
[[gnu::always_inline]] inline void add_two(const T* first, const T* second, float divisor, float* result, int64_t count) {
#pragma GCC ivdep  // the result may be one of the rows, but each sum only depends on the values at its own place
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

/// Adds in kLanes partial sums on every processor, so that all get the same bits. In double, as the norm of gradients that no reduction has
/// squared, so that both are the same number in float.
[[gnu::always_inline]] inline double sum_of_squares(const float* values, int64_t count) {
  constexpr int64_t kLanes = 32;
  std::array<double, kLanes> lanes = {};
  const auto square = [&](int64_t i) { return static_cast<double>(values[i]) * static_cast<double>(values[i]); };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; lane++) lanes[lane] += square(i + lane);
  }
  for (int64_t lane = 0; i < count; i++, lane++) lanes[lane] += square(i);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
[[gnu::always_inline]] inline void add_block(const T* const* rows, int64_t ranks, int64_t begin, int64_t count, float divisor,
                                             float* result, double* squares) {
  if (ranks == 2) {
    add_two(rows[0] + begin, rows[1] + begin, divisor, result + begin, count);
  } else {
    // The sums can't be kept in the result, which may be one of the rows.
    std::array<float, kBlock> sum;
    take_one(rows[0] + begin, sum.data(), count);
    for (int64_t rank = 1; rank < ranks; rank++) add_one(rows[rank] + begin, sum.data(), count);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) result[begin + i] = sum[i] / divisor;
  }
  if (squares != nullptr) *squares += sum_of_squares(result + begin, count);  // while the result is in the cache
}

TESSERA_KERNEL void add_floats(const float* const* rows, int64_t ranks, int64_t begin, int64_t count, float divisor, float* result,
                               double* squares) {
  add_block(rows, ranks, begin, count, divisor, result, squares);
}

TESSERA_KERNEL void add_bfloats(const uint16_t* const* rows, int64_t ranks, int64_t begin, int64_t count, float divisor, float* result,
                                double* squares) {
  add_block(rows, ranks, begin, count, divisor, result, squares);
}

template <class T, class Add>
void in_blocks(std::span<const std::span<const std::byte>> rows, const at::Tensor& result, float divisor, double* squares, const Add& add) {
  c10::SmallVector<const T*, 16> pointers;
  for (const auto& row : rows) pointers.push_back(reinterpret_cast<const T*>(row.data()));
  auto* const target = result.data_ptr<float>();
  // The parts, each with a sum of squares of its own, depend only on the length, and not on the number of threads.
  std::array<double, 64> sums = {};
  const auto count = result.numel();
  const auto part = (count / std::ssize(sums) / kBlock + 1) * kBlock;
  at::parallel_for(0, (count + part - 1) / part, std::max<int64_t>(1, kGrain / part), [&](int64_t first, int64_t last) {
    for (auto i = first; i < last; i++) {
      auto* const sum = squares == nullptr ? nullptr : &sums[i];
      const auto end = std::min((i + 1) * part, count);
      for (auto begin = i * part; begin < end; begin += kBlock) {
        add(pointers.data(), std::ssize(pointers), begin, std::min(kBlock, end - begin), divisor, target, sum);
      }
    }
  });
  if (squares != nullptr) *squares = std::accumulate(sums.begin(), sums.end(), *squares);
}

}  // namespace

bool add_rows(std::span<const std::span<const std::byte>> rows, at::ScalarType dtype, const at::Tensor& result, float divisor,
              double* squares) {
  if (!result.is_contiguous()) return false;
  if (dtype == at::kFloat) {
    in_blocks<float>(rows, result, divisor, squares, add_floats);
  } else if (dtype == at::kBFloat16) {
    in_blocks<uint16_t>(rows, result, divisor, squares, add_bfloats);
  } else {
    return false;
  }
  return true;
}

}  // namespace tessera
