// The start-up self-test holds with this libtorch, and says what does not hold with another one.
#include "tessera/shard/paging/libtorch_checks.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/loaded_libtorch.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/paging/paging.h"
#include "tests/testing/transports.h"

namespace tessera::testing::libtorch_checks_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(SelfTest, HoldsInWhateverStateTheProgramIs) {
  install_paging();
  for (const auto& check : libtorch_checks()) EXPECT_TRUE(check.holds()) << check.fault;
  {
    const c10::InferenceMode inference;
    EXPECT_NO_THROW(expect_sound_libtorch());
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_NO_THROW(expect_sound_libtorch());
  at::autocast::set_autocast_enabled(at::kCPU, false);
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(expect_sound_libtorch());
  std::thread([] { EXPECT_NO_THROW(expect_sound_libtorch()); }).join();
}

// The same as a libtorch whose dispatcher skips the key.
TEST(SelfTest, NoticesADispatcherThatDoesNotCallTheFallback) {
  install_paging();
  const c10::impl::ExcludeDispatchKeyGuard skipped(kPagingKey);
  EXPECT_FALSE(libtorch_checks().front().holds());
}

// The same as a libtorch whose operators make no graph.
TEST(SelfTest, NoticesGraphsThatLeadNowhere) {
  install_paging();
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(libtorch_checks()[4].holds());
}

TEST(SelfTest, NamesAllThatFailsAndTheWayOut) {
  constexpr std::array<LibtorchCheck, 3> kChecks = {{
      {"spin", "rest", [] { return true; }},
      {"sing", "joy", [] { return false; }},
      {"dance", "feasts", []() -> bool { throw std::runtime_error("no music\nat all"); }},
  }};
  EXPECT_THAT(message_of<UsageError>([&] { expect_sound_libtorch(kChecks); }),
              AllOf(HasSubstr("does not sing, which Tessera needs for joy; it does not dance (no music), which Tessera needs for feasts"),
                    HasSubstr("Use libtorch 2.11 to 2.14"), Not(HasSubstr("spin"))));
}

TEST(SelfTest, TakesALibtorchOfTheSameMinorVersion) {
  const auto own = loaded_libtorch();
  ASSERT_THAT(own, ::testing::StartsWith("2."));
  EXPECT_NO_THROW(expect_fitting_libtorch());
  EXPECT_NO_THROW(expect_fitting_libtorch(own.substr(0, own.rfind('.')) + ".97+cpu"));
  EXPECT_NO_THROW(expect_fitting_libtorch(""));
  for (const std::string other : {"2.1.0", "2.99.1", "3.0.0", "2"}) {
    EXPECT_THAT(message_of<UsageError>([&] { expect_fitting_libtorch(other); }),
                AllOf(HasSubstr("has loaded libtorch " + other + ","), HasSubstr("load a libtorch 2.")));
  }
}

}  // namespace
}  // namespace tessera::testing::libtorch_checks_test
