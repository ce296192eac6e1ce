// The loop of rotary embeddings over heads in host memory, of float32 or of bfloat16 (as uint16_t).
#pragma once

#include <cstdint>

namespace tessera::nn {

/// Where values of {batch, length, heads} lie, whose heads are contiguous.
template <class T>
struct Heads {
  T* values;
  int64_t batch, length, head;  // strides
};

template <class T>
struct Rotation {
  Heads<const T> from;
  Heads<T> to;
  const float* cos;
  const float* sin;
  int64_t batch_of_table;  // the stride over batches, 0 if all have the same positions
  int64_t length, heads, size, pairs;
  float direction;  // 1, or -1 to turn back
};

/// Turns the heads of texts' tokens [begin, end), counted over the whole batch.
void run(const Rotation<float>& rotation, int64_t begin, int64_t end);
void run(const Rotation<uint16_t>& rotation, int64_t begin, int64_t end);

}  // namespace tessera::nn
