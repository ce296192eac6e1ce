#include "tessera/shard/codec.h"

#include <ATen/ATen.h>

#include <stdexcept>

namespace tessera {
namespace {

class CastCodec final : public Codec {
 public:
  explicit CastCodec(std::optional<at::ScalarType> dtype) : dtype_(dtype) {}

  at::ScalarType computed(at::ScalarType stored) const override { return at::isFloatingType(stored) ? dtype_.value_or(stored) : stored; }
  Form sent(at::ScalarType stored, int64_t numel) const override { return {.dtype = computed(stored), .numel = numel}; }
  bool encodes(at::ScalarType stored) const override { return computed(stored) != stored; }
  void encode(const at::Tensor& stored, const at::Tensor& sent) const override { sent.copy_(stored); }

 private:
  const std::optional<at::ScalarType> dtype_;
};

}  // namespace

void Codec::decode(const at::Tensor& /*sent*/, const at::Tensor& /*computed*/) const {
  throw std::logic_error("a codec whose decodes() returns true must override decode()");
}

CodecPtr cast_codec(std::optional<at::ScalarType> dtype) {
  return std::make_shared<CastCodec>(dtype);
}

at::Tensor encoded(const Codec& codec, const at::Tensor& stored) {
  if (!codec.encodes(stored.scalar_type())) return stored;
  const auto form = codec.sent(stored.scalar_type(), stored.numel());
  auto sent = at::empty({form.numel}, stored.options().dtype(form.dtype));
  codec.encode(stored, sent);
  return sent;
}

}  // namespace tessera
