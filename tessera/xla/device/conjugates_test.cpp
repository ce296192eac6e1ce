// Views with the conjugate or the negative bit: operators, copies and reads respect it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/testing/xla_device.h"

namespace tessera::xla::conjugates_test {
namespace {

at::Tensor numbers(int64_t rows, int64_t columns) {
  const auto real = torch::arange(rows * columns, torch::kFloat).sin().view({rows, columns});
  return torch::complex(real, real.cos());
}

TEST(Conjugates, AreMultiplied) {
  const auto a = numbers(3, 4), b = numbers(3, 5), on_device = a.to(device_for_tests());
  const auto product = on_device.conj().t().mm(b.to(device_for_tests()));
  EXPECT_TRUE(at::allclose(product.cpu(), a.conj().t().mm(b)));
}

TEST(Conjugates, GiveComplexProductsTheirGradients) {
  std::vector<at::Tensor> gradients;
  for (const auto device : {device_for_tests(), at::Device(at::kCPU)}) {
    const auto x = numbers(3, 4).to(device).requires_grad_(), w = numbers(4, 2).to(device).requires_grad_();
    x.mm(w).abs().mean().backward();
    gradients.insert(gradients.end(), {x.grad().cpu(), w.grad().cpu()});
  }
  EXPECT_TRUE(at::allclose(gradients[0], gradients[2], 1e-4, 1e-6));
  EXPECT_TRUE(at::allclose(gradients[1], gradients[3], 1e-4, 1e-6));
}

TEST(Conjugates, AreCopiedAndWritten) {
  const auto a = numbers(3, 4), on_device = a.to(device_for_tests());
  EXPECT_TRUE(at::equal(on_device.conj().cpu(), a.conj()));
  EXPECT_TRUE(at::equal(torch::imag(on_device.conj()).cpu(), torch::imag(a.conj())));
  EXPECT_FALSE(on_device.equal(on_device.conj()));
  auto written = torch::zeros_like(on_device);
  written.conj().copy_(on_device);
  EXPECT_TRUE(at::equal(written.cpu(), a.conj().resolve_conj()));
}

}  // namespace
}  // namespace tessera::xla::conjugates_test
