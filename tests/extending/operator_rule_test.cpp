// A rule of one's own for an operator of XLA devices: `polygamma`, which runs on the CPU without it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/elements.h"
#include "tessera/xla/metrics.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla {
namespace {

/// The derivative number n of the logarithmic derivative of the gamma function.
Value polygamma(const Elements& e) {
  return hlo::binary("chlo.polygamma", e.number(0), e[1]);
}

void register_own_operators() {
  const Kernel kernels[] = {
      elementwise("polygamma", polygamma),
  };
  add_kernels(kernels);
}

TEST(OwnOperatorRule, ComputesWhatTheCpuDoes) {
  const auto device = device_for_tests();
  register_own_operators();
  const auto x = at::linspace(0.25, 5, 20).requires_grad_();
  const auto on_device = x.detach().to(device).requires_grad_();
  for (const int64_t n : {1, 2, 3}) EXPECT_TRUE(at::allclose(at::polygamma(n, on_device).cpu(), at::polygamma(n, x), 1e-4)) << n;
  at::polygamma(1, on_device).sum().backward();
  at::polygamma(1, x).sum().backward();
  EXPECT_TRUE(at::allclose(on_device.grad().cpu(), x.grad(), 1e-4));
  EXPECT_TRUE(metrics().fallbacks.empty()) << metrics_report();
}

}  // namespace
}  // namespace tessera::xla
