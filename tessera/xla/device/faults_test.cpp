// Failures on the device are errors that name the cause, and the process can continue.
#include "tessera/base/error.h"
#include "tessera/xla/device/device.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/ops.h"
#include "tests/testing/transports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::xla {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using tessera::testing::message_of;

at::TensorOptions on_device() {
  static const auto device = make_device();
  return torch::TensorOptions(device).dtype(torch::kFloat);
}

TEST(Faults, TheDeviceIsMadeOnce) {
  on_device();
  EXPECT_THAT(message_of<UsageError>([] { make_device(); }), HasSubstr("has its XLA device already"));
}

TEST(Faults, ATensorOfAnotherDeviceIsRefused) {
  const auto x = torch::ones({3}, on_device());
  const auto words = AllOf(HasSubstr("a tensor on cpu with 3 elements"), HasSubstr("move it to the device first"));
  EXPECT_THAT(message_of<UsageError>([&] { (void)x.view({1, 3}).mm(torch::ones({3, 1})); }), words);
  EXPECT_THAT(message_of<c10::Error>([&] { (void)(x + torch::ones({3})); }), HasSubstr("at least two devices, xla:0 and cpu"));
  EXPECT_EQ((x * torch::full({}, 2.0F)).sum().item<float>(), 6);
}

TEST(Faults, AnotherIndexThanThatOfTheDeviceIsRefused) {
  const auto x = torch::ones({3}, on_device());
  const at::Device second(kXla, 1);
  const auto words = AllOf(HasSubstr("there is no device xla:1"), HasSubstr("world.replicas(tensor)"));
  EXPECT_THAT(message_of<UsageError>([&] { (void)torch::ones({3}, second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)torch::zeros({3}, second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)torch::randn({3}, second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)torch::arange(3, second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)torch::ones({3}).to(second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)torch::ones({3, 3}).t().to(second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)x.to(second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)at::empty_like(x, at::TensorOptions(second)); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { const c10::DeviceGuard guard(second); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { (void)at::globalContext().defaultGenerator(second); }), words);
  EXPECT_EQ(torch::ones({3}, at::Device(kXla)).sum().item<float>(), 3);
}

TEST(Faults, AResultThatDoesNotFitInPlaceIsRefused) {
  auto x = torch::ones({3, 2}, on_device());
  const auto mask = torch::ones({2, 2}, on_device()).to(at::kBool);
  EXPECT_THAT(message_of<UsageError>([&] { x[2].masked_fill_(mask, 5); }),
              AllOf(HasSubstr("aten::masked_fill_.Scalar has a result of sizes [2, 2]"), HasSubstr("sizes [2] can't take in place")));
  EXPECT_TRUE(at::equal(x.cpu(), torch::ones({3, 2})));
  auto out = torch::empty({0}, on_device());
  at::add_out(out, x, x);
  EXPECT_EQ(out.sum().item<float>(), 12);
}

TEST(Faults, AnOperatorThatNobodyHasIsNamed) {
  torch::Library library(torch::Library::DEF, "tessera_test", std::nullopt, __FILE__, __LINE__);
  library.def("nowhere(Tensor x) -> Tensor");
  const auto nowhere = c10::Dispatcher::singleton().findSchemaOrThrow("tessera_test::nowhere", "").typed<at::Tensor(const at::Tensor&)>();
  const auto x = torch::ones({3}, on_device());
  EXPECT_THAT(message_of<UsageError>([&] { nowhere.call(x); }), HasSubstr("no lowering of tessera_test::nowhere, and the CPU has no kernel"));
  EXPECT_EQ(x.sum().item<float>(), 3);
}

TEST(Faults, AfterAFailedCompileTensorsAreWhatTheyWere) {
  auto weight = torch::ones({3}, on_device());
  step_boundary();
  weight.mul_(5);
  const auto loss = new_tensor(hlo::unary("nonsense", read(weight)));
  EXPECT_THAT(message_of<Error>([] { step_boundary(); }), AllOf(HasSubstr("can't compile a program"), HasSubstr("nonsense")));
  EXPECT_TRUE(at::equal(weight.cpu(), torch::ones({3})));
  EXPECT_THAT(message_of<UsageError>([&] { (void)loss.cpu(); }), HasSubstr("is lost, because the program"));
  EXPECT_THAT(message_of<UsageError>([&] { (void)(loss + weight).cpu(); }), HasSubstr("is lost, because the program"));
  weight.mul_(2);
  step_boundary();
  EXPECT_EQ(weight.sum().item<float>(), 6);
}

TEST(Faults, MemoryThatDoesNotSufficeIsAnError) {
  auto weight = torch::ones({3}, on_device());
  step_boundary();
  {
    const auto large = torch::ones({int64_t{1} << 41}, on_device());
    const auto first = large.narrow(0, 0, 1);
    // A plugin reports the failure when the program starts, or when a result is read.
    const auto message = message_of<Error>([&] {
      step_boundary();
      (void)first.cpu();
    });
    EXPECT_THAT(message, ::testing::ContainsRegex("[Oo]ut of memory"));
  }
  weight.mul_(2);
  EXPECT_EQ(weight.sum().item<float>(), 6);
}

}  // namespace
}  // namespace tessera::xla
