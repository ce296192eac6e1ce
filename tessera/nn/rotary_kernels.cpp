#include "tessera/nn/rotary_kernels.h"

#include "tessera/base/kernel.h"
#include "tessera/nn/rows.h"

namespace tessera::nn {
namespace {

template <class T>
[[gnu::always_inline]] inline void turn(const Rotation<T>& r, int64_t begin, int64_t end) {
  for (auto token = begin; token < end; token++) {
    const auto batch = token / r.length, at = token % r.length;
    const float* const cos = r.cos + batch * r.batch_of_table + at * r.pairs;
    const float* const sin = r.sin + batch * r.batch_of_table + at * r.pairs;
    for (int64_t head = 0; head < r.heads; head++) {
      const T* const from = r.from.values + batch * r.from.batch + at * r.from.length + head * r.from.head;
      T* const to = r.to.values + batch * r.to.batch + at * r.to.length + head * r.to.head;
#pragma GCC ivdep
      for (int64_t i = 0; i < r.pairs; i++) {
        const float first = to_float(from[i]), second = to_float(from[i + r.pairs]), s = r.direction * sin[i];
        store(to[i], first * cos[i] - second * s);
        store(to[i + r.pairs], second * cos[i] + first * s);
      }
      for (auto i = 2 * r.pairs; i < r.size; i++) to[i] = from[i];
    }
  }
}

}  // namespace

TESSERA_KERNEL void run(const Rotation<float>& rotation, int64_t begin, int64_t end) {
  turn(rotation, begin, end);
}
TESSERA_KERNEL void run(const Rotation<uint16_t>& rotation, int64_t begin, int64_t end) {
  turn(rotation, begin, end);
}

}  // namespace tessera::nn
