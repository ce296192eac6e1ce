// Two jobs never save under one prefix, and a job that was killed does not keep the next job from resuming.
#include "tessera/checkpoint/prefix_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "tessera/base/atomic_write.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::prefix_lock_test {
namespace {

using checkpoint::PrefixLock;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(PrefixLock, IsRefusedWhileAnotherJobHasIt) {
  const Folder folder;
  const auto prefix = folder / "run";
  {
    const PrefixLock first(prefix, self_world());
    run_ranks(2, [&](const Communicator& world) {
      const auto message = message_of<ConfigError>([&] { PrefixLock second(prefix, world); });
      EXPECT_THAT(message, HasSubstr("another job saves its checkpoints as"));
      EXPECT_THAT(message, AllOf(HasSubstr("process " + std::to_string(::getpid())), HasSubstr("run.lock")));
    });
    const PrefixLock other(folder / "another", self_world());
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  run_ranks(2, [&](const Communicator& world) { const PrefixLock free(prefix, world); });
}

const ChildTask hold("hold the lock", [](const std::string& prefix) {
  const PrefixLock lock(prefix, self_world());
  write_file(std::filesystem::path(prefix).parent_path() / "has-it", "");
  std::this_thread::sleep_for(std::chrono::seconds(60));
  return 1;
});

TEST(PrefixLock, EndsWithItsOwner) {
  const Folder folder;
  const auto prefix = folder / "run";
  Process owner({this_program()}, hold.environment(prefix), Process::Output::Capture);
  while (!std::filesystem::exists(folder / "has-it")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_THAT(message_of<ConfigError>([&] { PrefixLock second(prefix, self_world()); }),
              HasSubstr("process " + std::to_string(owner.pid())));
  ::kill(owner.pid(), SIGKILL);
  EXPECT_EQ(owner.wait(std::chrono::seconds(10)), 128 + SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(folder / "run.lock"));
  const PrefixLock next(prefix, self_world());
}

const ChildTask fill("fill a folder", [](const std::string& path) {
  const NewFolder made(path);
  write_file(unfinished_path(path) / "torn", "");
  write_file(std::filesystem::path(path).parent_path() / "has-it", "");
  std::this_thread::sleep_for(std::chrono::seconds(60));
  return 1;
});

TEST(PlacesOfSaves, BelongToOneJobUntilItEnds) {
  const Folder folder;
  const auto path = folder / "a";
  Process owner({this_program()}, fill.environment(path), Process::Output::Capture);
  while (!std::filesystem::exists(folder / "has-it")) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_THAT(message_of<IoError>([&] { NewFolder second(path); }),
              AllOf(HasSubstr("another job is writing"), HasSubstr("process " + std::to_string(owner.pid())), HasSubstr("a.lock")));
  EXPECT_TRUE(std::filesystem::exists(folder / "a.part/torn"));
  ::kill(owner.pid(), SIGKILL);
  EXPECT_EQ(owner.wait(std::chrono::seconds(10)), 128 + SIGKILL);
  NewFolder next(path);
  EXPECT_FALSE(std::filesystem::exists(folder / "a.part/torn"));
  std::filesystem::remove_all(folder / "a.part");
  std::filesystem::create_directory(folder / "a.part");  // as a program without this lock would do
  EXPECT_THAT(message_of<IoError>([&] { next.commit(); }), HasSubstr("is not the folder that this save has made"));
}

TEST(PrefixLock, NeedsAPlaceToWrite) {
  const Folder folder;
  write_file(folder / "file", "text");
  EXPECT_THAT(message_of<IoError>([&] { PrefixLock lock(folder / "file/run", self_world()); }), HasSubstr("file/run"));
  EXPECT_THAT(message_of<UsageError>([&] { PrefixLock lock(folder.path() / "", self_world()); }), HasSubstr("is a folder"));
  std::filesystem::create_symlink("elsewhere", folder / "run.lock");
  EXPECT_THAT(message_of<IoError>([&] { PrefixLock lock(folder / "run", self_world()); }), HasSubstr("run.lock"));
}

}  // namespace
}  // namespace tessera::testing::prefix_lock_test
