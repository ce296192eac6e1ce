// The loops of RMSNorm, of rotary embeddings and of quantised weights, over host memory of float32 or of bfloat16 (as uint16_t).
#pragma once

#include <array>
#include <cstdint>

namespace tessera::nn {

/// Computes y = x * r * weight for the rows [begin, end), with r = 1 / sqrt(mean of x * x + eps), and stores r for backward.
template <class T>
struct NormForward {
  const T* x;
  const float* weight;
  T* y;
  float* r;
  int64_t size;
  float eps;
};
void run(const NormForward<float>& norm, int64_t begin, int64_t end);
void run(const NormForward<uint16_t>& norm, int64_t begin, int64_t end);

/// Computes the gradient of x, and adds the gradient of the weight to `sums`.
template <class T>
struct NormBackward {
  const T* grad;
  const T* x;
  const float* weight;
  const float* r;
  T* grad_x;
  int64_t size;
};
void run(const NormBackward<float>& norm, int64_t begin, int64_t end, float* sums);
void run(const NormBackward<uint16_t>& norm, int64_t begin, int64_t end, float* sums);

/// Values of {batch, length, heads, size}, where each head's values are contiguous.
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
  int64_t batch_of_table;  // the stride of cos and sin over the batch; 0 if all rows have the same positions
  int64_t length, heads, size, pairs;
  float direction;  // 1, or -1 to turn back
};

/// Turns the heads of tokens [begin, end), counted over the whole batch.
void run(const Rotation<float>& rotation, int64_t begin, int64_t end);
void run(const Rotation<uint16_t>& rotation, int64_t begin, int64_t end);

constexpr int64_t kQuantBlock = 64;  // values that have one scale

/// The 16 values of NF4.
extern const std::array<float, 16> kNf4;

/// The largest absolute value.
float largest(const float* values, int64_t count);
/// Encodes one block: two codes a byte, the first one in the high half.
void nf4_codes(const float* values, int64_t count, float scale, uint8_t* codes);
/// Decodes blocks of 64 values with one scale for each block. `count` may end within a block.
void nf4_values(const uint8_t* codes, const float* scales, int64_t count, float* values);
void nf4_values(const uint8_t* codes, const float* scales, int64_t count, uint16_t* bfloats);
/// Decodes blocks of 64 values with one byte each: the value is of_code[byte] times the scale of its block.
void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, float* values);
void byte_values(const uint8_t* codes, const float* of_code, const float* scales, int64_t count, uint16_t* bfloats);

}  // namespace tessera::nn
