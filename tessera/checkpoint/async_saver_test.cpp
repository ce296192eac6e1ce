// Tests of saves that run while training continues.
#include "tessera/checkpoint/async_saver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/shard/full_params.h"
#include "tests/extending/memory_storage.h"
#include "tests/testing/allocations.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::async_saver_test {
namespace {

using checkpoint::AsyncSaver;
using checkpoint::latest;
using checkpoint::SaveOptions;
using checkpoint::step_folder;
using ::testing::HasSubstr;

TEST(AsyncSaver, SavesWhatWasThereWhenItBegan) {
  for (const int ranks : {1, 2, 3, 4}) {
    const Folder folder;
    with_ranks(ranks, [&](const Communicator& world) {
      const PictureRun run(world);
      AsyncSaver saver(world);
      EXPECT_TRUE(saver.poll());
      for (int step = 0; step < 3; step++) {
        run.train(step, step + 1);
        saver.save(step_folder(folder / "run", step + 1), contents(run, {{"step", step + 1}}));
      }
      const auto state = full_state(*run.model);
      const auto expected = run.train(3, 6);
      saver.wait();
      EXPECT_TRUE(saver.poll());
      EXPECT_TRUE(checkpoint::verify(step_folder(folder / "run", 2)).faults.empty());

      ASSERT_EQ(latest(folder / "run"), step_folder(folder / "run", 3));
      const PictureRun fresh(world, shard_nested, 0.25);
      EXPECT_EQ(load(step_folder(folder / "run", 3), fresh), (checkpoint::Notes{{"step", 3}}));
      expect_same(full_state(*fresh.model), state);
      EXPECT_EQ(fresh.train(3, 6), expected);
    });
  }
}

TEST(AsyncSaver, CommitsWithoutBeingAsked) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    AsyncSaver saver(world);
    saver.save(folder / "a", contents(run));
    while (!checkpoint::is_complete(folder / "a")) std::this_thread::yield();
    while (!saver.poll()) std::this_thread::yield();
  });
}

TEST(AsyncSaver, CopiesIntoTheSameBuffersEachTime) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = std::make_shared<torch::nn::LinearImpl>(300, 300);
    fully_shard(net, {.mesh = world});
    AsyncSaver saver(world);
    const auto bytes_of_save = [&](const std::string& name) {
      const Allocations taken;
      saver.save(folder / name, {.model = net.get()});
      return taken.bytes();
    };
    const auto first = bytes_of_save("a");
    if (on_cpu()) {
      EXPECT_GT(first, 300 * 300 * 4 / 2);  // only on the CPU: Allocations does not count pinned memory
    }
    EXPECT_LT(bytes_of_save("b"), 50'000);  // the generator's state and small allocations, but no new buffers
  });
}

TEST(AsyncSaver, TellsAllRanksThatOneCouldNotWriteAndGoesOn) {
  const Folder folder;
  const auto prefix = folder / "run";
  with_ranks(3, [&](const Communicator& world) {
    const PictureRun run(world);
    AsyncSaver saver(world);
    saver.save(step_folder(prefix, 1), contents(run));
    saver.wait();
    {
      std::optional<FullDisk> full;
      if (world.is_first()) full.emplace(100'000);  // limits the process; ranks without long notes write less
      world.barrier();
      const auto expect_refused = [&](const std::string& said) {
        EXPECT_THAT(said, world.rank() == 1 ? HasSubstr("File too large") : HasSubstr("rank 1 could not save"));
        EXPECT_TRUE(saver.poll());
        world.barrier();
        EXPECT_FALSE(std::filesystem::exists(step_folder(prefix, 2)));
        EXPECT_FALSE(std::filesystem::exists(step_folder(prefix, 2).string() + ".part"));
        world.barrier();
      };
      const auto too_long = contents(run, {{"long", std::string(world.rank() == 1 ? 200'000 : 0, 'x')}});
      saver.save(step_folder(prefix, 2), too_long);
      expect_refused(message_of<IoError>([&] {
        for (int step = 2;; step++) {
          run.train(step, step + 1);
          saver.poll();
        }
      }));
      saver.save(step_folder(prefix, 2), too_long);
      expect_refused(message_of<IoError>([&] { saver.wait(); }));
      saver.save(step_folder(prefix, 2), too_long);
      expect_refused(message_of<IoError>([&] { saver.save(step_folder(prefix, 3), contents(run)); }));
    }
    world.barrier();
    EXPECT_EQ(latest(prefix), step_folder(prefix, 1));
    saver.save(step_folder(prefix, 2), contents(run));
    saver.wait();
    EXPECT_EQ(latest(prefix), step_folder(prefix, 2));
  });
}

TEST(AsyncSaver, RefusesAtOnceWhatCanNotBegin) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    AsyncSaver saver(world);
    saver.save(folder / "a", contents(run));
    EXPECT_THAT(message_of<IoError>([&] { saver.save(folder / "a", contents(run)); }), HasSubstr("there is a "));
    EXPECT_THAT(message_of<UsageError>([&] { saver.save(folder / "b", {}); }), HasSubstr("needs a model"));
    EXPECT_THAT(message_of<UsageError>([&] { saver.save(folder / "b", contents(run), {.keep = checkpoint::Keep{}}); }),
                HasSubstr("PREFIX-step-N"));
    EXPECT_TRUE(saver.poll());
  });
}

TEST(AsyncSaver, FinishesBeforeItIsDestroyed) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    AsyncSaver(world).save(folder / "a", contents(run));
    EXPECT_TRUE(checkpoint::is_complete(folder / "a"));
  });
}

TEST(AsyncSaver, DoesNotWaitForRanksThatHaveFailed) {
  const Folder folder;
  const auto said = message_of<UsageError>([&] {
    with_ranks(2, [&](const Communicator& world) {
      const PictureRun run(world);
      AsyncSaver saver(world);
      if (world.rank() == 1) throw UsageError("over");
      saver.save(folder / "a", contents(run));
    });
  });
  EXPECT_THAT(said, HasSubstr("over"));
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
}

TEST(AsyncSaver, RemovesOldCheckpointsAfterTheCommit) {
  const Folder folder;
  const auto prefix = folder / "run";
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    AsyncSaver saver(world);
    for (const int step : {8, 9, 10, 11}) saver.save(step_folder(prefix, step), contents(run), {.keep = checkpoint::Keep{.last = 2}});
    saver.wait();
  });
  std::vector<int64_t> steps;
  for (const auto& each : checkpoint::step_folders(prefix)) steps.push_back(each.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{10, 11}));
  EXPECT_EQ(std::filesystem::read_symlink(folder / "run-latest"), "run-step-000011");
}

/// One object of rank 1 is never written until release().
class StuckStorage : public own::MemoryStorage {
 public:
  std::unique_ptr<Upload> create(const std::string& name) override {
    return std::make_unique<Stuck>(*this, name.find("rank-1") != std::string::npos, MemoryStorage::create(name));
  }

  void release() {
    is_released_ = true;
    is_released_.notify_all();
    while (uploads_ > 0) std::this_thread::yield();
  }

 private:
  struct Stuck : Upload {
    Stuck(StuckStorage& all, bool waits, std::unique_ptr<Upload> object) : all(all), waits(waits), object(std::move(object)) {
      all.uploads_++;
    }
    ~Stuck() override { all.uploads_--; }
    void write(int part, std::span<const std::byte> bytes) override {
      if (waits) all.is_released_.wait(false);
      object->write(part, bytes);
    }
    void complete() override { object->complete(); }

    StuckStorage& all;
    const bool waits;
    const std::unique_ptr<Upload> object;
  };

  std::atomic<bool> is_released_ = false;
  std::atomic<int> uploads_ = 0;
};

TEST(AsyncSaver, DoesNotOutlastItsLimitWhereNothingIsWritten) {
  static const auto storage = std::make_shared<StuckStorage>();  // outlives the detached threads
  use_storage("stuck", storage);
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    AsyncSaver saver(world.with_limit(std::chrono::seconds(2)));
    const auto expect_named = [&](const std::string& said) {
      EXPECT_THAT(said, HasSubstr("nothing was written for 2 s, so its disk, store or device does not answer"));
      EXPECT_THAT(said, world.rank() == 0 ? HasSubstr("rank 1 could not save stuck://a") : HasSubstr("nothing was written"));
      EXPECT_TRUE(saver.poll());
    };
    saver.save("stuck://a", contents(run));
    EXPECT_FALSE(saver.poll());
    expect_named(message_of<IoError>([&] { saver.wait(); }));
    saver.save("stuck://a", contents(run));
    expect_named(message_of<IoError>([&] { saver.save("stuck://b", contents(run)); }));
    saver.save(folder / "c", contents(run));  // does not reuse the buffers from which the stuck threads write
    saver.wait();
    EXPECT_TRUE(checkpoint::is_complete(folder / "c"));
    AsyncSaver(world.with_limit(std::chrono::seconds(2))).save("stuck://d", contents(run));  // the destructor logs the error
  });
  EXPECT_FALSE(checkpoint::is_complete("stuck://a"));
  storage->release();
  use_storage("stuck", nullptr);
}

}  // namespace
}  // namespace tessera::testing::async_saver_test
