// Codec: converts the values of a unit from the form that shards store to the form that is sent to other ranks, and from that to the form
// with which operators compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace tessera {

/// The counterpart of FSDP2's all-gather extensions. All tensors are flat. The tensor `stored` is one rank's chunk, in the dtype of the
/// parameters.
class Codec {
 public:
  virtual ~Codec() = default;

  /// The dtype that operators compute with.
  virtual at::ScalarType computed(at::ScalarType stored) const = 0;
  struct Form {
    at::ScalarType dtype;
    int64_t numel;
  };
  /// The form in which a chunk of `numel` stored values is sent.
  virtual Form sent(at::ScalarType stored, int64_t numel) const = 0;

  /// Whether the sent form differs from the stored form.
  virtual bool encodes(at::ScalarType stored) const = 0;
  /// Writes the sent form of `stored` to `sent`. If the two forms are the same, it copies.
  virtual void encode(const at::Tensor& stored, const at::Tensor& sent) const = 0;

  /// Whether the computed form differs from the sent form. If it does not, the all-gather writes straight into the unsharded memory.
  virtual bool decodes(at::ScalarType /*stored*/) const { return false; }
  /// Writes the computed form of one rank's sent chunk to `computed`. Called only where decodes() is true.
  virtual void decode(const at::Tensor& sent, const at::Tensor& computed) const;
};
using CodecPtr = std::shared_ptr<const Codec>;

/// The codec of MixedPrecision::param_dtype: floating-point values are sent and computed with in `dtype`. Without a dtype, and for values
/// that are not floating-point, all three forms are the same.
CodecPtr cast_codec(std::optional<at::ScalarType> dtype);

/// The sent form of a chunk. If it is the same as the stored form, this is the chunk itself and not a copy.
at::Tensor encoded(const Codec& codec, const at::Tensor& stored);

}  // namespace tessera
