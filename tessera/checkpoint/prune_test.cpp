// Tests which checkpoints of a run stay.
#include "tessera/checkpoint/prune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/step_folders.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::prune_test {
namespace {

using checkpoint::Keep;
using checkpoint::prune;
using checkpoint::step_folder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Checkpoints at steps 10, 20, ..., 60 with the losses 6, 1, 5, 2, 4, 3.
std::filesystem::path save_six(const Folder& folder) {
  const auto prefix = folder / "run";
  with_ranks(1, [&](const Communicator& world) {
    const PictureRun run(world);
    const double losses[] = {6, 1, 5, 2, 4, 3};
    for (int i = 0; i < 6; i++) save(step_folder(prefix, 10 * (i + 1)), run, {{"loss", losses[i]}});
  });
  return prefix;
}

std::vector<int64_t> steps_of(const std::filesystem::path& prefix) {
  std::vector<int64_t> steps;
  for (const auto& each : checkpoint::step_folders(prefix)) steps.push_back(each.step);
  return steps;
}

TEST(Prune, KeepsTheNewest) {
  const Folder folder;
  const auto prefix = save_six(folder);
  EXPECT_THAT(prune(prefix, {.last = 2}),
              ElementsAre(step_folder(prefix, 10), step_folder(prefix, 20), step_folder(prefix, 30), step_folder(prefix, 40)));
  EXPECT_THAT(steps_of(prefix), ElementsAre(50, 60));
}

TEST(Prune, KeepsEveryFewStepsAndTheBest) {
  const Folder folder;
  const auto prefix = save_six(folder);
  prune(prefix, {.every = 30, .best = 2, .metric = "loss"});
  EXPECT_THAT(steps_of(prefix), ElementsAre(20, 30, 40, 60));
  prune(prefix, {.best = 1, .metric = "loss", .higher_is_better = true});
  EXPECT_THAT(steps_of(prefix), ElementsAre(30, 60));
}

TEST(Prune, TakesNothingForTheBestThatIsNoNumber) {
  const Folder folder;
  const auto prefix = folder / "run";
  with_ranks(1, [&](const Communicator& world) {
    const PictureRun run(world);
    const double losses[] = {0.2, std::nan(""), 0.1, std::nan(""), 0.3, std::nan("")};
    for (int i = 0; i < 6; i++) save(step_folder(prefix, 10 * (i + 1)), run, {{"loss", losses[i]}});
  });
  prune(prefix, {.best = 2, .metric = "loss"});
  EXPECT_THAT(steps_of(prefix), ElementsAre(10, 30, 60));
}

TEST(Prune, LeavesOtherFoldersAlone) {
  const Folder folder;
  const auto prefix = save_six(folder);
  std::filesystem::remove(step_folder(prefix, 60) / "rank-0-of-1.safetensors");
  std::filesystem::create_directories(folder / "run-step-5.part");
  std::filesystem::create_directories(folder / "runner-step-1");
  std::filesystem::create_directories(folder / "run-step--5");
  prune(prefix, {.last = 1});
  EXPECT_THAT(steps_of(prefix), ElementsAre(50, 60));  // the newest checkpoint that can be loaded stays
  EXPECT_TRUE(std::filesystem::exists(folder / "run-step-5.part"));
  EXPECT_TRUE(std::filesystem::exists(folder / "runner-step-1"));
  EXPECT_TRUE(std::filesystem::exists(folder / "run-step--5"));
}

TEST(Prune, NeedsSense) {
  const Folder folder;
  const auto prefix = save_six(folder);
  EXPECT_THAT(message_of<UsageError>([&] { prune(prefix, {.last = 0}); }), HasSubstr("the newest checkpoint always stays"));
  EXPECT_THAT(message_of<UsageError>([&] { prune(prefix, {.best = 1}); }), HasSubstr("needs a metric"));
  EXPECT_THAT(message_of<UsageError>([&] { prune(prefix, {.best = 1, .metric = "accuracy"}); }), HasSubstr("has no note 'accuracy'"));
  EXPECT_EQ(steps_of(prefix).size(), 6U);
}

TEST(Prune, OfSeveralRanksIsDoneByOne) {
  const Folder folder;
  const auto prefix = save_six(folder);
  with_ranks(3, [&](const Communicator& world) {
    EXPECT_EQ(prune(prefix, {.last = 5}, world).size(), world.rank() == 0 ? 1U : 0U);
    const auto said = message_of<UsageError>([&] { prune(prefix, {.last = 0}, world); });
    EXPECT_THAT(said, HasSubstr("the newest checkpoint always stays"));
  });
  EXPECT_EQ(steps_of(prefix).size(), 5U);
}

}  // namespace
}  // namespace tessera::testing::prune_test
