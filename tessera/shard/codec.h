// The three forms of a unit's values: stored in the shards, sent to other ranks, and computed with by operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace tessera {

/// What FSDP2 calls all-gather extensions. All tensors are flat; `stored` is the chunk of one rank.
class Codec {
 public:
  virtual ~Codec() = default;

  /// The dtype that operators compute with.
  virtual at::ScalarType computed(at::ScalarType stored) const = 0;
  /// What is sent for a chunk of so many stored values.
  struct Form {
    at::ScalarType dtype;
    int64_t numel;
  };
  virtual Form sent(at::ScalarType stored, int64_t numel) const = 0;

  /// Whether the sent form is another than the stored one.
  virtual bool encodes(at::ScalarType stored) const = 0;
  /// Where it is not, this copies.
  virtual void encode(const at::Tensor& stored, const at::Tensor& sent) const = 0;

  /// Whether the computed form is another than the sent one. If not, a gather fills the memory that operators use.
  virtual bool decodes() const { return false; }
  /// Of what one rank has sent.
  virtual void decode(const at::Tensor& sent, const at::Tensor& computed) const;
};
using CodecPtr = std::shared_ptr<const Codec>;

/// Floating values are sent and computed with in the dtype, if there is one: MixedPrecision::param_dtype. All others stay as they are stored.
CodecPtr cast_codec(std::optional<at::ScalarType> dtype);

/// The sent form of a chunk: the chunk itself where that is the stored form.
at::Tensor encoded(const Codec& codec, const at::Tensor& stored);
/// The computed form of a chunk, as this rank would receive it.
at::Tensor decoded(const Codec& codec, const at::Tensor& stored);

}  // namespace tessera
