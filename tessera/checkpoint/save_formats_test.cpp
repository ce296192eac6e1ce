// Saves in other formats than Tessera's, in which every rank writes its part, equal a checkpoint of Tessera that is converted.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::save_formats_test {
namespace {

using checkpoint::AccelerateLayout;
using checkpoint::ConvertOptions;
using checkpoint::Format;
using checkpoint::SaveOptions;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Way {
  const char* name;
  SaveOptions options;
  bool weights_only = false;
  bool same_files = true;  // whether a conversion writes the same bytes
};

/// The picture's convolution has its channels last, so that a rank's values are not contiguous in the files.
const std::vector<Way> kWays = {
    {.name = "dcp", .options = {.format = Format::Dcp}, .same_files = false},
    {.name = "sharded", .options = {.format = Format::Accelerate}, .same_files = false},
    {.name = "full", .options = {.format = Format::Accelerate, .accelerate_layout = AccelerateLayout::Full}},
    {.name = "replicated", .options = {.format = Format::Accelerate, .accelerate_layout = AccelerateLayout::Replicated}},
    {.name = "whole.pt", .options = {.format = Format::Torch}},
    {.name = "hub", .options = {.format = Format::Hub, .max_shard_size = 300}, .weights_only = true},
    {.name = "model.safetensors", .options = {.format = Format::Safetensors}, .weights_only = true},
};

checkpoint::Contents contents_of(const PictureRun& run, const Way& way) {
  if (way.weights_only) return {.model = run.model.get()};
  return contents(run, {{"step", 3}});
}

/// Expects equal files, but for the number of the save and the checksums that depend on it.
void expect_same_bytes(const std::filesystem::path& one, const std::filesystem::path& other) {
  constexpr size_t kDigits = 10, kChecksums = 16 + 2 * 4;
  const auto first = read_file(one), second = read_file(other);
  ASSERT_EQ(first.size(), second.size()) << one;
  size_t different = 0;
  for (size_t i = 0; i < first.size(); i++) different += first[i] == second[i] ? 0 : 1;
  EXPECT_LE(different, kDigits + kChecksums) << one;
}

void expect_same_files(const std::filesystem::path& one, const std::filesystem::path& other) {
  if (!std::filesystem::is_directory(one)) {
    expect_same_bytes(one, other);
    return;
  }
  for (const auto& entry : std::filesystem::directory_iterator(one)) {
    const auto name = entry.path().filename();
    expect_same_bytes(entry.path(), other / name);
  }
}

/// Saves in every way, and compares each save with a conversion of a checkpoint of Tessera.
void expect_saved(int ranks, const ShardPicture& shard) {
  const Folder folder;
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world, shard);
    run.train(0, 3);
    auto all = contents(run, {{"step", 3}});
    checkpoint::save(folder / "weights", {.model = run.model.get()}, world);
    all.notes["optimizer.param_groups"] = all.optimizer.settings(*run.model);
    checkpoint::save(folder / "run", all, world);
    for (const auto& way : kWays) checkpoint::save(folder / way.name, contents_of(run, way), world, way.options);
  });
  for (const auto& way : kWays) {
    SCOPED_TRACE(fmt::format("{} of {} ranks", way.name, ranks));
    const auto found = checkpoint::diff(folder / (way.weights_only ? "weights" : "run"), folder / way.name);
    EXPECT_TRUE(found.different.empty()) << checkpoint::to_table(found);
    EXPECT_THAT(found.only_other, ::testing::IsEmpty());
    EXPECT_THAT(found.only_one, ::testing::Each(HasSubstr("generator")));
    if (!way.same_files) continue;
    const auto converted = folder / fmt::format("converted-{}", way.name);
    checkpoint::convert(folder / (way.weights_only ? "weights" : "run"), converted,
                        {.to = way.options.format,
                         .world = ranks,
                         .max_shard_size = way.options.max_shard_size,
                         .accelerate_layout = way.options.accelerate_layout});
    expect_same_files(converted, folder / way.name);
  }
}

TEST(SavesInOtherFormats, AreAsConversions) {
  expect_saved(1, shard_nested);
  expect_saved(2, shard_nested);
  expect_saved(3, [](const auto& model, const Communicator& world) { fully_shard(model, {.mesh = world, .layout = Layout::Rows}); });
  expect_saved(2, [](const auto& /*model*/, const auto& /*world*/) {});  // not sharded: every rank has all values
  expect_saved(4, [](const auto& model, const Communicator& world) {
    fully_shard(model, {.mesh = Mesh(world, {.replicate = 2, .shard = 2}), .replicated = {model->conv->bias}});
  });
}

bool is_picture(const Picture& model, double scale) {
  const Picture other(scale);
  return same_values(model.conv->weight, other.conv->weight) && same_values(model.head->weight, other.head->weight) &&
         same_values(model.frozen->weight, other.frozen->weight);
}

TEST(SavesInOtherFormats, AreDividedOverReplicas) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(
        world, [](const auto& model, const Communicator& all) { fully_shard(model, {.mesh = Mesh(all, {.replicate = 2, .shard = 1})}); });
    checkpoint::save(folder / "dcp", {.model = run.model.get()}, world, {.format = Format::Dcp});
  });
  for (const auto* file : {"__0_0.distcp", "__1_0.distcp"}) EXPECT_GT(std::filesystem::file_size(folder / "dcp" / file), 0U) << file;
}

TEST(SavesInOtherFormats, RefuseWhatHasNoPlaceThere) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    const auto refusal = [&](const checkpoint::Contents& contents, const SaveOptions& options, const char* name = "out") {
      return message_of<UsageError>([&] { checkpoint::save(folder / name, contents, world, options); });
    };
    const checkpoint::Contents model{.model = run.model.get()};
    EXPECT_THAT(refusal(contents(run), {.format = Format::Hub}), HasSubstr("holds the model alone"));
    EXPECT_THAT(refusal(contents(run, {{"step", 1}}), {.format = Format::Safetensors}), HasSubstr("holds the model alone"));
    EXPECT_THAT(refusal(model, {.format = Format::TorchXla}), HasSubstr("are read, not written"));
    EXPECT_THAT(refusal(model, {.format = Format::Dcp, .keep = checkpoint::Keep{.last = 1}}), HasSubstr("SaveOptions::keep"));
    EXPECT_THAT(refusal(model, {.format = Format::Dcp, .in_place = true}), HasSubstr("SaveOptions::in_place"));
    EXPECT_THAT(refusal(model, {.format = Format::Torch}, "model.safetensors"), HasSubstr("asks for another format"));
    EXPECT_THAT(refusal(model, {.format = Format::Dcp}, "model.pt"), HasSubstr("is the name of a file"));
    checkpoint::AsyncSaver saver(world);
    EXPECT_THAT(message_of<UsageError>([&] { saver.save(folder / "async", model, {.format = Format::Dcp}); }), HasSubstr("AsyncSaver"));
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SavesInOtherFormats, FailOnAllRanksForWhatOnlyOneWrites) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    auto all = contents(run);
    all.tensors = {{"waves", at::zeros({2}, at::kComplexDouble)}};  // only rank 0 writes it, but the error is on all ranks
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / "out", all, world, {.format = Format::Dcp}); }), HasSubstr("waves"));
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save("", {.model = run.model.get()}, world, {.format = Format::Dcp}); }),
                HasSubstr("this name is empty"));
  });
}

TEST(SavesInOtherFormats, ReplaceWhatALinkLeadsToUnderAnyName) {
  const Folder folder;
  const auto place = folder / "place\xff";  // not UTF-8
  std::filesystem::create_directories(place);
  std::filesystem::create_directories(folder / "blobs");
  write_file(folder / "blobs/one", "old");
  std::filesystem::create_symlink(folder / "blobs/one", place / "model.safetensors");
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    checkpoint::save(place, {.model = run.model.get()}, world, {.format = Format::Hub});
    checkpoint::save(folder / "native", {.model = run.model.get()}, world);
  });
  EXPECT_TRUE(std::filesystem::is_symlink(place / "model.safetensors"));
  EXPECT_TRUE(checkpoint::diff(folder / "native", place).different.empty());
}

TEST(SavesInOtherFormats, MakeTheFolderAroundThem) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const auto& way : kWays) checkpoint::save(folder / "new" / way.name / way.name, contents_of(run, way), world, way.options);
  });
  for (const auto& way : kWays) EXPECT_TRUE(std::filesystem::exists(folder / "new" / way.name / way.name)) << way.name;
}

TEST(SavesOfTwoJobs, TakeTurnsAtOnePlace) {
  const Folder folder;
  const auto said = AllOf(HasSubstr("another job is writing"), HasSubstr("process " + std::to_string(::getpid())), HasSubstr(".lock"));
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    const auto expect_refused = [&](const char* name, const SaveOptions& options) {
      std::optional<NamedLock> other;
      if (world.is_first()) other.emplace(lock_place(folder / name));
      EXPECT_THAT(message_of<IoError>([&] { checkpoint::save(folder / name, {.model = run.model.get()}, world, options); }), said);
      EXPECT_EQ(names_in(folder.path())->size(), 1U);  // the lock
      world.barrier();
    };
    expect_refused("native", {});
    expect_refused("native", {.in_place = true});
    for (const auto* name : {"dcp", "sharded", "full"}) {
      const auto way = std::ranges::find_if(kWays, [&](const Way& each) { return each.name == std::string(name); });
      expect_refused(name, way->options);
    }
    std::optional<NamedLock> other;
    if (world.is_first()) other.emplace(lock_place(folder / "async"));
    checkpoint::AsyncSaver saver(world);
    EXPECT_THAT(message_of<IoError>([&] { saver.save(folder / "async", {.model = run.model.get()}); }), said);
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

/// Two jobs save at one path again and again. Each save succeeds, or its error names the other job. The path is complete at any time.
TEST(SavesOfTwoJobs, NeverMix) {
  const Folder folder;
  constexpr int kSaves = 6;
  auto ways = kWays;
  ways.push_back({.name = "native", .options = {}});
  ways.push_back({.name = "in-place", .options = {.in_place = true}});
  for (const auto& way : ways) {
    const bool is_new_each_time = way.options.format == Format::Dcp || way.options.format == Format::Tessera;
    const auto place = [&](int save) { return folder / (is_new_each_time ? fmt::format("{}-{}", way.name, save) : std::string(way.name)); };
    std::atomic<int> saved = 0;
    std::vector<std::thread> jobs;
    for (const int job : {1, 2}) {
      jobs.emplace_back([&, job] {
        with_ranks(2, [&](const Communicator& world) {
          const PictureRun run(world, shard_nested, job);
          for (int i = 0; i < kSaves; i++) {
            try {
              checkpoint::save(place(i), {.model = run.model.get()}, world, way.options);
              if (world.is_first()) saved++;
            } catch (const IoError& error) {
              EXPECT_THAT(error.what(), AnyOf(HasSubstr("another job"), HasSubstr("somebody else is writing"), HasSubstr("there is a ")));
            }
          }
        });
      });
    }
    for (auto& job : jobs) job.join();
    EXPECT_GE(saved, is_new_each_time ? kSaves / 2 : 1) << way.name;
    for (int i = 0; i < kSaves; i++) {
      if (!std::filesystem::exists(place(i))) continue;
      Picture model(0.25);
      checkpoint::load_weights(model, place(i));
      const bool is_one = is_picture(model, 1) || is_picture(model, 2);
      EXPECT_TRUE(is_one) << place(i);
      EXPECT_TRUE(checkpoint::verify(place(i)).faults.empty()) << place(i);
    }
  }
  const auto names = names_in(folder.path()).value();
  EXPECT_THAT(names, ::testing::Each(Not(AnyOf(HasSubstr(".lock"), HasSubstr(".part")))));
}

TEST(SavesInOtherFormats, NeverReplaceAnythingElse) {
  const Folder folder;
  std::filesystem::create_directories(folder / "taken");
  write_file(folder / "taken/notes.txt", "mine");
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const auto format : {Format::Dcp, Format::Accelerate}) {
      EXPECT_THAT(message_of<Error>([&] { checkpoint::save(folder / "taken", {.model = run.model.get()}, world, {.format = format}); }),
                  ::testing::AnyOf(HasSubstr("there is a"), HasSubstr("is there already")));
    }
  });
  EXPECT_EQ(read_file(folder / "taken/notes.txt"), "mine");
}

}  // namespace
}  // namespace tessera::testing::save_formats_test
