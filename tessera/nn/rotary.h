// Rotary position embeddings: pairs of values of a head are turned by an angle that grows with the position.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tessera::nn {

/// The scaling by which Llama 3.1 extends embeddings learned on short texts to long ones.
struct Llama3Scaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;

  bool operator==(const Llama3Scaling&) const = default;
};

struct RotaryOptions {
  double theta = 10000;
  double partial_rotary_factor = 1;          // the share of a head's values that is turned: its first values
  double factor = 1;                         // divides positions
  std::optional<Llama3Scaling> llama3 = {};  // in place of `factor`

  bool operator==(const RotaryOptions&) const = default;
};

/// Cosines and sines of the angles of positions, in float32.
struct RotaryTable {
  at::Tensor cos, sin;  // {1 or batch, length, pairs}
};

/// The number of a head's values that are turned.
int64_t rotary_size(const RotaryOptions& options, int64_t head_size);

/// `positions`: integers {1 or batch, length}.
RotaryTable rotary_table(const RotaryOptions& options, int64_t head_size, const at::Tensor& positions);

/// Takes {batch, length, heads, size}, and returns {batch, heads, length, size}, contiguous, as attention wants it. Value i of a head is
/// turned together with value i + pairs; if the table has fewer pairs than half the size, the last values stay. Computed in float32. Throws
/// UsageError if the sizes of the table do not fit.
at::Tensor rotary(const at::Tensor& x, const RotaryTable& table);

}  // namespace tessera::nn
