// A process that has no XLA device yet.
#include "tessera/xla/init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::xla {
namespace {

using ::testing::HasSubstr;
using tessera::testing::message_of;

TEST(BeforeInit, NothingMovesToTheDevice) {
  torch::nn::Linear layer(2, 2);
  EXPECT_THAT(message_of<UsageError>([&] { to_device(*layer); }), HasSubstr("call tessera::xla::init first"));
  EXPECT_THAT(message_of<UsageError>([] { step_boundary(); }), HasSubstr("call tessera::xla::init first"));
  EXPECT_THAT(message_of<UsageError>([] { (void)metrics(); }), HasSubstr("call tessera::xla::init first"));
}

TEST(BeforeInit, OneProcessOfSeveralIsNoWorld) {
  ::setenv("RANK", "1", 1);
  ::setenv("WORLD_SIZE", "2", 1);
  EXPECT_THAT(message_of<ConfigError>([] { (void)init(); }), HasSubstr("this is rank 1 of 2 processes; start one by `tessera launch --distributed-type XLA`"));
  ::unsetenv("RANK");
  ::unsetenv("WORLD_SIZE");
}

TEST(BeforeInit, WrongOptionsAreNoReasonNotToTryAgain) {
  EXPECT_THAT(message_of<ConfigError>([] { (void)init({.plugin = "abacus"}); }), HasSubstr("no PJRT plugin is named 'abacus'"));
  EXPECT_THAT(message_of<UsageError>([] { (void)init({.devices = 100'000'000}); }), HasSubstr("no client has more than 1024"));
}

}  // namespace
}  // namespace tessera::xla
