// Batches of pictures are the same on any number of ranks and workers, and after a resume.
#include "tessera/vision/fetch_images.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/vision/image.h"
#include "tessera/vision/image_folder.h"
#include "tessera/vision/tar_shards.h"
#include "tests/testing/folder.h"
#include "tests/testing/image_files.h"
#include "tests/testing/net.h"
#include "tests/testing/transports.h"

namespace tessera::testing::fetch_images_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using vision::Damaged;
using vision::fetch_images;
using vision::ImageSet;
using vision::TestTransform;
using vision::TrainTransform;

constexpr int64_t kPictures = 130, kClasses = 4, kGlobalBatch = 60;
const TrainTransform kTrain{.crop = {.size = 6}, .jitter = {.brightness = 0.4, .hue = 0.1}};
const TestTransform kTest{.shorter_side = 8, .size = 6, .interpolation = vision::Interpolation::Bicubic};

/// The same pictures in folders and in archives.
class FetchImages : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    std::vector<std::pair<std::string, std::string>> members;
    for (int64_t i = 0; i < kPictures; i++) {
      const auto file = png_of(picture(i)), name = fmt::format("{:03}", i);
      const auto class_folder = *folder_ / fmt::format("pictures/{}", i * kClasses / kPictures);
      std::filesystem::create_directories(class_folder);
      write_file(class_folder / (name + ".png"), file);
      members.emplace_back(name + ".png", file);
      members.emplace_back(name + ".cls", std::to_string(i * kClasses / kPictures));
      if (i % 50 != 49 && i + 1 != kPictures) continue;
      write_file(*folder_ / fmt::format("shard-{}.tar", i / 50), tar_of(members));
      members.clear();
    }
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static ImageSet in_folders() { return vision::read_image_folder(*folder_ / "pictures"); }
  static ImageSet in_archives() { return vision::read_tar_shards(vision::expand_braces((*folder_ / "shard-{0..2}.tar").string())); }

  static inline std::unique_ptr<Folder> folder_;
};

data::Sampler sampler_of(int ranks, int rank) {
  return data::Sampler(
      {.size = kPictures, .global_batch = kGlobalBatch, .local_ranks = {rank}, .ranks = ranks, .tail = data::Tail::Fill, .seed = 3});
}

/// The global batches until the end of the second epoch, each of whose samples is one row.
template <class Transform>
std::vector<at::Tensor> batches_of(const ImageSet& images, const Transform& transform, int ranks, int workers, data::Position start = {}) {
  std::vector<std::unique_ptr<data::Loader>> loaders;
  for (int rank = 0; rank < ranks; rank++) {
    loaders.push_back(std::make_unique<data::Loader>(sampler_of(ranks, rank), fetch_images(images, transform),
                                                     data::LoaderOptions{.workers = workers, .start = start}));
  }
  std::vector<at::Tensor> batches;
  while (loaders.front()->position().epoch < 2) {
    std::vector<at::Tensor> parts;
    for (auto& loader : loaders) {
      const auto part = loader->next();
      if (!part) continue;
      EXPECT_TRUE(part->inputs.is_contiguous(at::MemoryFormat::ChannelsLast));
      parts.push_back(at::cat({part->inputs.flatten(1), part->targets.unsqueeze(1).to(at::kFloat)}, 1));
    }
    if (!parts.empty()) batches.push_back(at::cat(parts));
  }
  return batches;
}

void expect_same(std::span<const at::Tensor> actual, std::span<const at::Tensor> expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); i++) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
}

TEST_F(FetchImages, GivesAnyWorldAndAnyWorkersTheSameBatches) {
  const auto folders = in_folders(), archives = in_archives();
  const auto expected = batches_of(folders, kTrain, 1, 0);
  ASSERT_EQ(expected.size(), 6);
  for (int ranks = 1; ranks <= 5; ranks++) {
    expect_same(batches_of(archives, kTrain, ranks, ranks - 1), expected);
    for (int workers = 0; workers <= 8; workers++) {
      SCOPED_TRACE(fmt::format("{} ranks, {} workers", ranks, workers));
      expect_same(batches_of(folders, kTrain, ranks, workers), expected);
    }
  }
}

TEST_F(FetchImages, ResumesInMidEpochOnAnotherWorld) {
  for (const auto& images : {in_folders(), in_archives()}) {
    const auto expected = batches_of(images, kTrain, 2, 1);
    for (const int ranks : {1, 3, 5}) {
      for (const int64_t batch : {1, 2}) {
        expect_same(batches_of(images, kTrain, ranks, 2, {.epoch = 0, .batch = batch}),
                    std::span(expected).subspan(static_cast<size_t>(batch)));
        expect_same(batches_of(images, kTrain, ranks, 2, {.epoch = 1, .batch = batch}),
                    std::span(expected).subspan(3 + static_cast<size_t>(batch)));
      }
    }
  }
}

/// The rows of these batches, as many as there are pictures, without the order.
std::multiset<std::vector<float>> rows_of(std::span<const at::Tensor> batches) {
  std::multiset<std::vector<float>> rows;
  const auto all = at::cat(std::vector<at::Tensor>(batches.begin(), batches.end())).narrow(0, 0, kPictures).contiguous();
  for (int64_t i = 0; i < all.size(0); i++) {
    const auto* const begin = all[i].const_data_ptr<float>();
    rows.emplace(begin, begin + all.size(1));
  }
  return rows;
}

TEST_F(FetchImages, ShufflesAndDrawsAnewInEachEpoch) {
  const auto tested = batches_of(in_archives(), kTest, 1, 2), trained = batches_of(in_archives(), kTrain, 1, 2);
  const auto half = std::span(tested).first(3), other_half = std::span(tested).subspan(3);
  EXPECT_FALSE(at::equal(half[0], other_half[0]));
  EXPECT_EQ(rows_of(half), rows_of(other_half));
  EXPECT_NE(rows_of(std::span(trained).first(3)), rows_of(std::span(trained).subspan(3)));
}

TEST_F(FetchImages, TransformsTheWholePictureStepByStep) {
  const auto image = picture(7, 40, 30);
  const auto bytes = png_of(image);
  ASSERT_TRUE(at::equal(vision::decode_image(bytes, "x"), image));
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const auto places = at::empty({2, 3, 6, 6}, at::kFloat, format), expected = at::empty({3, 6, 6});
    for (uint64_t seed = 0; seed < 20; seed++) {
      vision::Draws draws(seed);
      auto by_steps = vision::crop(image, vision::draw_box(kTrain.crop, {.height = 40, .width = 30}, draws));
      by_steps = vision::resize(by_steps, {.height = 6, .width = 6});
      if (draws.chance(0.5)) by_steps = vision::flip(by_steps);
      vision::normalize_into(vision::jitter(by_steps, kTrain.jitter, draws), kTrain.normalize, expected);
      vision::apply(kTrain, bytes, "x", seed, places[1]);
      EXPECT_TRUE(at::equal(places[1], expected)) << seed;
    }
    const auto resized = vision::resize(image, {.height = 10, .width = 8}, kTest.interpolation);
    vision::normalize_into(vision::crop(resized, {.top = 2, .left = 1, .height = 6, .width = 6}), kTest.normalize, expected);
    vision::apply(kTest, bytes, "x", places[0]);
    EXPECT_TRUE(at::equal(places[0], expected));
  }
}

TEST_F(FetchImages, ThrowsOrCountsWhatIsDamaged) {
  const Folder folder;
  std::filesystem::create_directories(folder / "a");
  for (int64_t i = 0; i < 5; i++) write_file(folder / fmt::format("a/{}.png", i), png_of(picture(i)));
  write_file(folder / "a/1.png", png_of(picture(1)).substr(0, 60));
  write_file(folder / "a/3.png", "");
  const auto images = vision::read_image_folder(folder.path());
  const std::vector<int64_t> numbers = {0, 1, 2, 3, 4};
  const std::vector<uint64_t> seeds(5);
  const auto damaged_name = (folder / "a/1.png").string();
  EXPECT_THAT(message_of<IoError>([&] { fetch_images(images, kTest)(numbers); }), HasSubstr(damaged_name));
  EXPECT_THAT(message_of<IoError>([&] { fetch_images(images, kTrain)(numbers, seeds); }),
              AllOf(HasSubstr(damaged_name), HasSubstr("with --skip-damaged (vision::Damaged)")));
  const auto damaged = std::make_shared<Damaged>();
  std::string logged;
  const auto before = set_log_sink([&](const LogRecord& record) { logged += std::string(record.text) + "\n"; });
  const auto tested = fetch_images(images, kTest, damaged)(numbers);
  const auto trained = fetch_images(images, kTrain, damaged)(numbers, seeds);
  set_log_sink(before);
  EXPECT_THAT(damaged->names(), ElementsAre(damaged_name, (folder / "a/3.png").string()));
  EXPECT_THAT(logged, AllOf(HasSubstr(damaged_name), HasSubstr((folder / "a/3.png").string())));
  EXPECT_EQ(std::ranges::count(logged, '\n'), 2);  // each once
  for (const auto& batch : {tested, trained}) {
    EXPECT_TRUE(at::equal(batch.targets, at::tensor({0, -100, 0, -100, 0}, at::kLong)));
    EXPECT_TRUE(at::equal(batch.inputs.flatten(1).ne(0).any(1), batch.targets.eq(0)));
  }
  std::filesystem::remove(folder / "a/4.png");
  EXPECT_THAT(message_of<IoError>([&] { fetch_images(images, kTest, damaged)(numbers); }), HasSubstr((folder / "a/4.png").string()));
}

TEST_F(FetchImages, CountsDamagedPicturesOfAllRanksOnce) {
  const Folder folder;
  std::filesystem::create_directories(folder / "a");
  for (int64_t i = 0; i < 3; i++) write_file(folder / fmt::format("a/{}.png", i), i == 0 ? png_of(picture(i)) : "");
  const auto images = vision::read_image_folder(folder.path());
  const auto before = set_log_sink([](const LogRecord&) {});
  with_ranks(2, [&](const Communicator& world) {
    const auto damaged = std::make_shared<Damaged>();
    const auto fetch = fetch_images(images, kTest, damaged);
    EXPECT_THAT(damaged->names_on(world), IsEmpty());
    fetch(std::vector<int64_t>{1 + world.rank()});
    EXPECT_EQ(damaged->names().size(), 1);
    EXPECT_THAT(message_of<IoError>([&] { damaged->names_on(world); }),
                HasSubstr("not one picture could be decoded, but 2 are damaged, such as " + images.name(1)));
    fetch(std::vector<int64_t>{0, 1});
    EXPECT_THAT(damaged->names_on(world), ElementsAre(images.name(1), images.name(2)));
  });
  set_log_sink(before);
}

TEST_F(FetchImages, RefusesWhatCanNotWork) {
  const auto images = in_folders();
  const auto place = at::empty({3, 6, 6});
  const auto long_line = png_of(picture(1, 1, 2'000'000));
  EXPECT_THAT(message_of<IoError>([&] { vision::apply(TestTransform{.size = 6}, long_line, "x.png", place); }),
              HasSubstr("x.png has 256 by 512000000 pixels"));
  EXPECT_THAT(message_of<UsageError>([&] { fetch_images(images, TestTransform{.size = 0}); }), HasSubstr("pictures of 0 by 0"));
  const std::vector<int64_t> beyond = {kPictures};
  EXPECT_THAT(message_of<UsageError>([&] { fetch_images(images, kTest)(beyond); }), HasSubstr("there is no picture 130: the set has 130"));
}

}  // namespace
}  // namespace tessera::testing::fetch_images_test
