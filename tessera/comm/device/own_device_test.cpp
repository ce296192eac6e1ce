#include "tessera/comm/device/own_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::own_device_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(OwnDevice, OfAKindThatThisBuildDoesNotKnowIsRefusedWithWhatBringsIt) {
  EXPECT_THAT(why_none_of("xla"), AllOf(HasSubstr("no XLA devices"), HasSubstr("xla-cpu-pjrt"), Not(HasSubstr("CUDA"))));
  EXPECT_THAT(why_none_of("cuda"), AllOf(HasSubstr("TESSERA_LINK_CUDA=ON"), Not(HasSubstr("xla"))));
}

}  // namespace
}  // namespace tessera::own_device_test
