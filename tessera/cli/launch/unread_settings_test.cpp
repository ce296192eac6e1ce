// Remarks of launch on settings that no rank reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/init.h"
#include "tessera/train/trainer.h"
#include "tests/testing/child_task.h"
#include "tests/testing/launched.h"

namespace tessera::testing::unread_settings_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A program that has its own training loop, without a Trainer.
const ChildTask joins("joins a world", [](const std::string& how) {
  if (how == "with a Trainer") return Trainer().num_processes() == 2 ? 0 : 1;
  return init().size() == 2 ? 0 : 1;
});

TEST(LaunchSettings, AreNamedWhereNobodyReadsThem) {
  const auto said = [](const std::string& how, const Command& flags) {
    return Launched(launch("2", {this_program()}, flags), joins.environment(how)).end().err;
  };
  const Command flags = {"--mixed-precision", "bf16", "--fsdp-version", "2", "--tessera-transport", "shm"};
  EXPECT_THAT(said("itself", flags),
              HasSubstr("launch: no rank has read the settings, as a Trainer does, so these had no effect: mixed_precision, fsdp_version\n"));
  EXPECT_THAT(said("with a Trainer", flags), Not(HasSubstr("had no effect")));
  EXPECT_THAT(said("itself", {"--tessera-transport", "shm", "--mixed-precision", "no"}), Not(HasSubstr("had no effect")));
  EXPECT_THAT(run("2", {"true"}, {}, flags).err, Not(HasSubstr("had no effect")));  // perhaps another library reads them
}

}  // namespace
}  // namespace tessera::testing::unread_settings_test
