// Pictures have the pixels that Pillow reads, also in parts, and damaged files are refused by name.
#include "tessera/vision/image.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <random>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::testing::image_test {
namespace {

using namespace std::string_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using vision::Box;
using vision::DecodeOptions;

bool reads_webp() {
  try {
    vision::size_of_image("RIFF    WEBP", "a");
  } catch (const ConfigError&) {
    return false;  // of a build without libwebp
  } catch (const IoError&) {  // it is cut off
  }
  return true;
}

at::Tensor part_of(const at::Tensor& picture, const Box& box) {
  return picture.narrow(1, box.top, box.height).narrow(2, box.left, box.width);
}

/// The files of image_files.py, which are written once.
class ImageFiles : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    written_ = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/image_files.py", folder_->path()});
  }
  static void TearDownTestSuite() { folder_.reset(); }

  void SetUp() override {
    if (written_.status == kNoPackage) GTEST_SKIP() << "build/python has no package Pillow";
    ASSERT_EQ(written_.status, 0) << written_.output;
  }

  static std::filesystem::path path(const std::string& name) { return *folder_ / name; }

  /// Calls `act` with the name and the bytes of each file.
  template <class Act>
  static void for_each_file(const Act& act) {
    const bool has_webp = reads_webp();
    int count = 0;
    for (const auto& name : checkpoint::SafetensorsFile(path("expected.safetensors")).names()) {
      if (!has_webp && name.ends_with(".webp")) continue;
      SCOPED_TRACE(name);
      act(name, read_file(path(name)));
      count++;
    }
    EXPECT_GT(count, 100);
  }

 private:
  static std::unique_ptr<Folder> folder_;
  static Ended written_;
};

std::unique_ptr<Folder> ImageFiles::folder_;
Ended ImageFiles::written_;

TEST_F(ImageFiles, HaveThePixelsThatPillowReads) {
  const checkpoint::SafetensorsFile expected(path("expected.safetensors"));
  for_each_file([&](const std::string& name, const std::string& bytes) {
    const auto picture = vision::read_image(path(name), {.exif_orientation = true});
    const auto pixels = picture.permute({1, 2, 0});
    EXPECT_TRUE(pixels.is_contiguous());
    EXPECT_TRUE(at::equal(pixels, expected.read(name)));
    const auto size = vision::size_of_image(bytes, name);
    const auto stored = vision::decode_image(bytes, name);
    EXPECT_EQ(stored.sizes(), at::IntArrayRef({3, size.height, size.width}));
    if (!name.starts_with("turned-")) {
      EXPECT_TRUE(at::equal(stored, picture));
    }
  });
}

TEST_F(ImageFiles, AreDecodedInParts) {
  std::mt19937 random(1);
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  for_each_file([&](const std::string& name, const std::string& bytes) {
    const auto whole = vision::decode_image(bytes, name);
    for (int i = 0; i < 20; i++) {
      const auto top = below(whole.size(1)), left = below(whole.size(2));
      const Box part{.top = top, .left = left, .height = 1 + below(whole.size(1) - top), .width = 1 + below(whole.size(2) - left)};
      EXPECT_TRUE(at::equal(vision::decode_image(bytes, name, {.part = part}), part_of(whole, part)))
          << part.height << " by " << part.width << " from " << top << ", " << left;
      const auto few = vision::decode_image(bytes, name, {.part = part, .may_shrink_to = 5});
      EXPECT_GE(few.size(1), std::min<int64_t>(part.height, 5));
      EXPECT_GE(few.size(2), std::min<int64_t>(part.width, 5));
      EXPECT_LE(few.size(1), part.height);
    }
  });
}

TEST_F(ImageFiles, AreShrunkIfJpegsOnly) {
  constexpr int64_t kHeight = 67, kWidth = 101;
  for (const std::string name : {"420-67-101-baseline.jpg", "444-67-101-progressive.jpg", "grey.jpg", "cmyk.jpg"}) {
    SCOPED_TRACE(name);
    const auto whole = vision::read_image(path(name)).to(at::kFloat).unsqueeze(0);
    for (const auto& [at_least, divisor] : {std::pair{34, 1}, {33, 2}, {17, 2}, {16, 4}, {9, 4}, {8, 8}, {1, 8}}) {
      const auto shrunk = vision::read_image(path(name), {.may_shrink_to = at_least});
      ASSERT_EQ(shrunk.sizes(), at::IntArrayRef({3, (kHeight + divisor - 1) / divisor, (kWidth + divisor - 1) / divisor})) << at_least;
      // Each pixel is nearly the mean of those in its place.
      const auto means = at::avg_pool2d(whole, {divisor, divisor});
      const auto there = shrunk.narrow(1, 0, means.size(2)).narrow(2, 0, means.size(3)).to(at::kFloat);
      EXPECT_LT((there - means[0]).abs().mean().item<double>(), 3) << at_least;
      // Its borders are rounded outwards.
      const Box part{.top = 10, .left = 21, .height = 50, .width = 60};
      if (std::min(part.height, part.width) / divisor < at_least || (divisor < 8 && 2 * divisor * at_least <= part.height)) continue;
      const auto from = [&](int64_t begin) { return begin / divisor; };
      const auto to = [&](int64_t end) { return (end + divisor - 1) / divisor; };
      const auto expected = part_of(shrunk, {.top = from(10), .left = from(21), .height = to(60) - from(10), .width = to(81) - from(21)});
      EXPECT_TRUE(at::equal(vision::read_image(path(name), {.part = part, .may_shrink_to = at_least}), expected)) << at_least;
    }
  }
  EXPECT_EQ(vision::read_image(path("quantized.png"), {.may_shrink_to = 1}).sizes(), at::IntArrayRef({3, kHeight, kWidth}));
}

TEST_F(ImageFiles, AreRefusedIfTruncated) {
  for_each_file([](const std::string& name, const std::string& bytes) {
    if (name.starts_with("turned-") || name == "more-behind-it.jpg") return;  // their pixels end earlier
    for (size_t length = 0; length < bytes.size(); length += length + 9 < bytes.size() ? 1 + bytes.size() / 30 : 1) {
      const auto first = bytes.substr(0, length);
      EXPECT_THAT(message_of<IoError>([&] { vision::decode_image(first, "a/" + name); }), HasSubstr("a/" + name))
          << length << " of " << bytes.size();
      // The part must not decide which files are damaged.
      EXPECT_NE(message_of<IoError>([&] { vision::decode_image(first, name, {.part = Box{.height = 1, .width = 1}}); }), "") << length;
    }
  });
  const auto bytes = read_file(path("420-67-101-baseline.jpg"));
  EXPECT_EQ(message_of<IoError>([&] { vision::decode_image(bytes.substr(0, 2000), "a.jpg"); }),
            "the JPEG a.jpg is damaged: it is truncated");
}

TEST_F(ImageFiles, HaveAnEndOfScans) {
  const auto bytes = read_file(path("444-64-96-progressive.jpg"));
  const auto scan = bytes.substr(bytes.rfind("\xff\xda"));
  auto many = bytes.substr(0, bytes.size() - 2);
  for (int i = 0; i < 600; i++) many += scan.substr(0, scan.size() - 2);
  EXPECT_EQ(message_of<IoError>([&] { vision::decode_image(many + "\xff\xd9", "a.jpg"); }),
            "the JPEG a.jpg is damaged: it has too many scans");
}

TEST_F(ImageFiles, HaveRightChecksumsEverywhere) {
  auto bytes = read_file(path("2-8-37-0.png"));
  const auto checksum = bytes.find("gAMA") + 8;  // of a chunk that the pixels do not need
  bytes[checksum] = static_cast<char>(bytes[checksum] ^ 1);
  EXPECT_THAT(message_of<IoError>([&] { vision::decode_image(bytes, "a.png"); }), HasSubstr("the PNG a.png is damaged"));
}

std::string png_of(const std::string& width, const std::string& height) {
  return "\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"s + width + height + "\x08\x02\0\0\0CRC."s;
}

TEST(Image, RefusesWhatIsNoPicture) {
  const auto refusal = [](const std::string& bytes) {
    auto said = message_of<IoError>([&] { vision::size_of_image(bytes, "a/b.jpg"); });
    EXPECT_EQ(message_of<IoError>([&] { vision::decode_image(bytes, "a/b.jpg"); }), said);
    return said;
  };
  EXPECT_EQ(refusal(""), "a/b.jpg is empty, and no picture");
  EXPECT_EQ(refusal("GIF89a"), "a/b.jpg is not a JPEG, PNG or WebP: it begins with 'GIF89a'");
  EXPECT_EQ(refusal("\xff\xd8 x"), "a/b.jpg is not a JPEG, PNG or WebP: it begins with the bytes ff d8 20 78");
  EXPECT_THAT(refusal("\xff\xd8\xff\xd9"), HasSubstr("a/b.jpg is damaged"));
  EXPECT_EQ(vision::size_of_image(png_of("\0\0\0\7"s, "\0\0\0\5"s), "a").width, 7);
  EXPECT_THAT(message_of<IoError>([] { vision::read_image("no/such.png"); }), HasSubstr("no/such.png"));
}

TEST(Image, RefusesSizesThatNoPictureHas) {
  const auto refusal = [](const std::string& width, const std::string& height) {
    return message_of<IoError>([&] { vision::size_of_image(png_of(width, height), "a.png"); });
  };
  EXPECT_THAT(refusal("\xff\xff\xff\xff", "\xff\xff\xff\xff"), AllOf(HasSubstr("a.png"), HasSubstr("4294967295 by 4294967295")));
  EXPECT_THAT(refusal("\0\1\0\0"s, "\0\0\x10\1"s), HasSubstr("4097 by 65536"));
  EXPECT_THAT(refusal("\0\0\0\0"s, "\0\0\0\1"s), HasSubstr("a.png is damaged"));
  EXPECT_EQ(vision::size_of_image(png_of("\0\1\0\0"s, "\0\0\x10\0"s), "a.png").height, 4096);
}

TEST_F(ImageFiles, HaveNoPartBeyondTheirBorders) {
  for (const std::string name : {"grey.jpg", "quantized.png", "RGB-lossy.webp"}) {
    if (!reads_webp() && name.ends_with(".webp")) continue;
    const auto refusal = [&](const Box& part) { return message_of<UsageError>([&] { vision::read_image(path(name), {.part = part}); }); };
    EXPECT_THAT(refusal({.top = 60, .height = 8, .width = 1}), AllOf(HasSubstr(name), HasSubstr("has 67 by 101")));
    EXPECT_NE(refusal({.left = 101, .height = 1, .width = 1}), "");
    EXPECT_NE(refusal({.top = -1, .height = 2, .width = 2}), "");
    EXPECT_NE(refusal({.height = 0, .width = 2}), "");
    EXPECT_NE(refusal({.left = 1, .height = 1, .width = std::numeric_limits<int64_t>::max()}), "");
  }
}

}  // namespace
}  // namespace tessera::testing::image_test
