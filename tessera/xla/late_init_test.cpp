// init() is refused after the first backward pass: autograd would have no thread for the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/xla/init.h"
#include "tests/testing/transports.h"

namespace tessera::xla {
namespace {

TEST(LateInit, AfterABackwardPassIsRefused) {
  torch::ones({2}, torch::requires_grad()).sum().backward();
  for (int i = 0; i < 2; i++) {
    EXPECT_THAT(tessera::testing::message_of<UsageError>([] { (void)init(); }),
                ::testing::HasSubstr("a backward pass ran before the XLA device was there"));
  }
}

}  // namespace
}  // namespace tessera::xla
