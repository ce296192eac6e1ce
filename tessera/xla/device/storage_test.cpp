// The memory of the device: cells with addresses of their own.
#include "tessera/base/error.h"
#include "tessera/xla/device/device.h"
#include "tessera/xla/device/storage.h"
#include "tests/testing/transports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

at::TensorOptions lazy() {
  static const auto device = make_device();
  return torch::TensorOptions(device).dtype(torch::kFloat);
}

/// A tensor over memory of which it knows only the address, like the tensors of a sharded model's units.
at::Tensor over(void* address, int64_t numel) {
  const auto bytes = static_cast<size_t>(numel) * sizeof(float);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(address, at::Device(kXla, 0)),
                                                             /*allocator=*/nullptr, /*resizable=*/false));
  return at::empty({0}, lazy()).set_(storage, 0, {numel}, {1});
}

TEST(Storage, IsKnownByItsAddress) {
  auto memory = torch::ones({6}, lazy());
  auto view = over(memory.data_ptr(), 6);
  view.narrow(0, 2, 2).mul_(5);
  EXPECT_TRUE(at::equal(memory.cpu(), torch::tensor({1.0F, 1.0F, 5.0F, 5.0F, 1.0F, 1.0F})));
  step_boundary();
  EXPECT_EQ(view.sum().item<float>(), 14);
  EXPECT_NE(memory.data_ptr(), torch::ones({6}, lazy()).data_ptr());
}

TEST(Storage, OfAnotherTypeIsResized) {
  auto x = torch::ones({2}, lazy());
  x.view(at::kHalf).fill_(0);
  x.resize_({4});
  EXPECT_TRUE(at::equal(x.cpu(), torch::zeros({4})));
}

TEST(Storage, WithoutMemoryIsAnError) {
  void* address = nullptr;
  {
    const auto gone = torch::ones({6}, lazy());
    address = gone.data_ptr();
  }
  EXPECT_THAT(tessera::testing::message_of<UsageError>([&] { (void)over(address, 6).cpu(); }), ::testing::HasSubstr("has no memory"));
}

TEST(Storage, TakesAddressesOfThoseThatAreGone) {
  const auto first = torch::empty({1000}, lazy()).data_ptr();
  for (int i = 0; i < 100; i++) EXPECT_EQ(torch::empty({1000}, lazy()).data_ptr(), first);
  EXPECT_THAT(tessera::testing::message_of<UsageError>([] { (void)torch::empty({int64_t{1} << 44}, lazy()); }), ::testing::HasSubstr("16 TB of addresses"));
}

}  // namespace
}  // namespace tessera::xla
