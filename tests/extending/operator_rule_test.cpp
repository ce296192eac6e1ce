// A rule of one's own for an operator of XLA devices: `angle`, which runs on the CPU without it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numbers>

#include "tessera/testing/xla_device.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/metrics.h"

namespace tessera::xla {
namespace {

/// Of numbers that are real: that of the negative ones is pi.
Value angle(const Elements& e) {
  const auto x = e[0];
  return hlo::select(hlo::is_nan(x), x, hlo::select(hlo::is_negative(x), hlo::fixed(x, std::numbers::pi), hlo::fixed(x, 0)));
}

void register_own_operators() {
  const Kernel kernels[] = {
      elementwise("angle", angle),
  };
  add_kernels(kernels);
}

TEST(OwnOperatorRule, ComputesWhatTheCpuDoes) {
  const auto device = device_for_tests();
  register_own_operators();
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto x = at::tensor({-2.0F, -0.0F, 0.0F, 3.0F, kNan}).to(dtype);
    const auto angles = x.to(device).angle().cpu();
    EXPECT_EQ(angles.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(angles.nan_to_num(7), x.angle().nan_to_num(7))) << angles;
  }
  EXPECT_FALSE(metrics().fallbacks.contains("aten::angle")) << metrics_report();
}

}  // namespace
}  // namespace tessera::xla
