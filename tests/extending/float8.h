// A codec of one's own: parameters are sent in eight bits of floating point, with a scale for each chunk.
#pragma once

#include <ATen/ATen.h>
#include <tessera/extending.h>

namespace own {

class Float8 final : public tessera::Codec {
 public:
  at::ScalarType computed(at::ScalarType stored) const override { return stored; }
  Form sent(at::ScalarType stored, int64_t numel) const override {
    return encodes(stored) ? Form{.dtype = at::kFloat8_e4m3fn, .numel = numel + kScale} : Form{.dtype = stored, .numel = numel};
  }

  bool encodes(at::ScalarType stored) const override { return at::isFloatingType(stored); }
  void encode(const at::Tensor& stored, const at::Tensor& sent) const override {
    const auto numel = stored.numel();
    const auto most = numel > 0 ? stored.abs().max().to(at::kFloat) : at::zeros({});
    const auto scale = most.clamp_min(1e-30).div(kLargest);
    sent.narrow(0, 0, numel).copy_(stored / scale);
    sent.narrow(0, numel, kScale).view(at::kByte).copy_(scale.view({1}).view(at::kByte));
  }

  bool decodes(at::ScalarType stored) const override { return encodes(stored); }
  void decode(const at::Tensor& sent, const at::Tensor& computed) const override {
    const auto numel = computed.numel();
    const auto scale = sent.narrow(0, numel, kScale).clone().view(at::kFloat);
    computed.copy_(sent.narrow(0, 0, numel).to(at::kFloat) * scale);
  }

 private:
  static constexpr double kLargest = 448;  // of Float8_e4m3fn
  static constexpr int64_t kScale = 4;     // bytes of a float
};

}  // namespace own
