// Rotary position embeddings: pairs of values of a head are turned by an angle that grows with the position.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::nn {

/// The scaling by which Llama 3.1 extends embeddings learned on short texts to long ones.
struct Llama3Scaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;

  bool operator==(const Llama3Scaling&) const = default;
};

/// YaRN: pairs that turn less than beta_slow times within the original length are slowed by `factor`, those that turn more than beta_fast
/// times keep their frequency.
struct YarnScaling {
  double factor = 1, beta_fast = 32, beta_slow = 1;
  int64_t original_max_position_embeddings = 2048;
  bool truncate = true;  // whether the bounds between these pairs are rounded to whole pairs

  bool operator==(const YarnScaling&) const = default;
};

/// LongRoPE: a divisor for the frequency of each pair, if all positions are below the original length and if not.
struct LongRopeScaling {
  std::vector<double> short_factor = {}, long_factor = {};
  int64_t original_max_position_embeddings = 4096;

  bool operator==(const LongRopeScaling&) const = default;
};

struct RotaryOptions {
  double theta = 10000;
  double partial_rotary_factor = 1;          // the share of a head's values that is turned: its first values
  double factor = 1;                         // divides positions
  std::optional<Llama3Scaling> llama3 = {};  // this and the two below: in place of `factor`
  std::optional<YarnScaling> yarn = {};
  std::optional<LongRopeScaling> longrope = {};
  double attention_factor = 1;  // multiplies cosines and sines

  bool operator==(const RotaryOptions&) const = default;
};

/// Cosines and sines of the angles of positions, in float32.
struct RotaryTable {
  at::Tensor cos, sin;  // {1 or batch, length, pairs}
};

/// The number of a head's values that are turned.
int64_t rotary_size(const RotaryOptions& options, int64_t head_size);

/// The attention_factor that YaRN and LongRoPE suggest for texts of up to `longest` tokens; 1 without them.
double usual_attention_factor(const RotaryOptions& options, int64_t longest);

/// `positions`: integers {1 or batch, length}.
RotaryTable rotary_table(const RotaryOptions& options, int64_t head_size, const at::Tensor& positions);

/// Takes {batch, length, heads, size}, and returns {batch, heads, length, size}, contiguous, as attention wants it. Value i of a head is
/// turned together with value i + pairs; if the table has fewer pairs than half the size, the last values stay. Computed in float32. Throws
/// UsageError if the sizes of the table do not fit.
at::Tensor rotary(const at::Tensor& x, const RotaryTable& table);

}  // namespace tessera::nn
