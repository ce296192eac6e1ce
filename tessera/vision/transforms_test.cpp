// Transforms make the same pixels as torchvision's, and draw the same from the same numbers.
#include "tessera/vision/transforms.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/vision/mixing.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::testing::transforms_test {
namespace {

using ::testing::HasSubstr;
using vision::Box;
using vision::Draws;
using vision::ImageSize;
using Numbers = std::vector<double>;

int64_t whole(double number) {
  return static_cast<int64_t>(number);
}
ImageSize size_of_picture(const at::Tensor& image) {
  return {.height = image.size(1), .width = image.size(2)};
}
Box box_of(const Numbers& numbers, size_t first = 0) {
  return {.top = whole(numbers[first]),
          .left = whole(numbers[first + 1]),
          .height = whole(numbers[first + 2]),
          .width = whole(numbers[first + 3])};
}
std::array<int64_t, 4> values_of(const Box& box) {
  return {box.top, box.left, box.height, box.width};
}

/// As decode_image() lays it out.
at::Tensor packed(const at::Tensor& image) {
  return image.permute({1, 2, 0}).contiguous().permute({2, 0, 1});
}

at::Tensor normalized(const at::Tensor& image) {
  auto place = at::empty({image.size(1), image.size(2), 3}).permute({2, 0, 1});
  vision::normalize_into(image, {}, place);
  return place;
}

using Transform = std::function<at::Tensor(const at::Tensor& image, const Numbers& numbers)>;

Transform resized_by(vision::Interpolation interpolation) {
  return [=](const at::Tensor& image, const Numbers& n) {
    return vision::resize(image, {.height = whole(n[0]), .width = whole(n[1])}, interpolation);
  };
}
Transform adjusted_by(at::Tensor (*adjust)(const at::Tensor&, double)) {
  return [=](const at::Tensor& image, const Numbers& n) { return adjust(image, n[0]); };
}

/// By the names in transform_files.py.
const std::map<std::string, Transform>& transforms() {
  static const std::map<std::string, Transform> all = {
      {"bilinear", resized_by(vision::Interpolation::Bilinear)},
      {"bicubic", resized_by(vision::Interpolation::Bicubic)},
      {"shorter_side",
       [](const at::Tensor& image, const Numbers& n) {
         return vision::resize(image, vision::resized_shorter_side(size_of_picture(image), whole(n[0])));
       }},
      {"crop", [](const at::Tensor& image, const Numbers& n) { return vision::crop(image, box_of(n)); }},
      {"resized_crop",
       [](const at::Tensor& image, const Numbers& n) {
         return vision::resize(vision::crop(image, box_of(n)), {.height = whole(n[4]), .width = whole(n[5])});
       }},
      {"center_crop",
       [](const at::Tensor& image, const Numbers& n) {
         return vision::crop(image, vision::center_box(size_of_picture(image), {.height = whole(n[0]), .width = whole(n[1])}));
       }},
      {"flip", [](const at::Tensor& image, const Numbers&) { return vision::flip(image); }},
      {"brightness", adjusted_by(vision::adjust_brightness)},
      {"contrast", adjusted_by(vision::adjust_contrast)},
      {"saturation", adjusted_by(vision::adjust_saturation)},
      {"sharpness", adjusted_by(vision::adjust_sharpness)},
      {"hue", adjusted_by(vision::adjust_hue)},
      {"augment", [](const at::Tensor& image,
                     const Numbers& n) { return vision::augment(image, static_cast<vision::AugmentOperation>(whole(n[0])), n[1]); }},
      {"normalize", [](const at::Tensor& image, const Numbers&) { return normalized(image); }},
      {"jitter",
       [](const at::Tensor& image, const Numbers& n) {
         Draws draws(static_cast<uint64_t>(n[0]));
         return vision::jitter(image, {.brightness = n[1], .contrast = n[2], .saturation = n[3], .hue = n[4]}, draws);
       }},
      {"rand_augment",
       [](const at::Tensor& image, const Numbers& n) {
         Draws draws(static_cast<uint64_t>(n[0]));
         return vision::rand_augment(image, {.operations = static_cast<int>(n[1]), .magnitude = static_cast<int>(n[2])}, draws);
       }},
  };
  return all;
}

/// In these, libtorch rounds the last elements of a loop, which fill no register, otherwise; which they are depends on the processor and on
/// strides.
const std::set<std::string> kBlends = {"contrast", "saturation", "sharpness", "jitter", "augment", "rand_augment"};

/// torchvision's pixels, computed once for all tests.
class Expected {
 public:
  Expected() : written_(run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/transform_files.py", folder_.path()})) {
    if (written_.status == 0) file_.emplace(folder_ / "expected.safetensors");
  }
  bool is_missing() const { return written_.status == kNoPackage; }
  const checkpoint::SafetensorsFile& file() const {
    if (!file_) throw std::runtime_error(written_.output);
    return *file_;
  }

 private:
  Folder folder_;
  Ended written_;
  std::optional<checkpoint::SafetensorsFile> file_;
};

class Transforms : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { expected_ = std::make_unique<Expected>(); }
  static void TearDownTestSuite() { expected_.reset(); }
  void SetUp() override {
    if (expected_->is_missing()) GTEST_SKIP() << "build/python has no package torchvision";
  }
  static const checkpoint::SafetensorsFile& file() { return expected_->file(); }
  static std::vector<Numbers> rows(const std::string& name) {
    const auto table = file().read(name);
    std::vector<Numbers> result;
    for (int64_t i = 0; i < table.size(0); i++) {
      const auto row = table[i];
      result.emplace_back(row.data_ptr<double>(), row.data_ptr<double>() + row.numel());
    }
    return result;
  }

 private:
  static inline std::unique_ptr<Expected> expected_;
};

TEST_F(Transforms, HaveThePixelsOfTorchvision) {
  std::map<std::string, int> compared;
  for (const auto& name : file().names()) {
    std::istringstream parts(name);
    std::string picture, operation, text, number;
    std::getline(parts, picture, '/');
    std::getline(parts, operation, '/');
    std::getline(parts, text);
    if (!transforms().contains(operation)) continue;
    Numbers numbers;
    for (std::istringstream in(text); std::getline(in, number, ',');) numbers.push_back(std::stod(number));
    const auto theirs = file().read(name);
    const auto image = file().read("picture/" + picture);
    const auto before = image.clone();
    for (const auto& laid : {packed(image), image}) {
      const auto ours = transforms().at(operation)(laid, numbers);
      ASSERT_EQ(ours.sizes(), theirs.sizes()) << name;
      ASSERT_EQ(ours.scalar_type(), theirs.scalar_type()) << name;
      const auto differ = (ours != theirs).sum().item<int64_t>();
      if (ours.is_floating_point()) {
        EXPECT_TRUE(at::allclose(ours, theirs, 1e-6, 1e-6)) << name;
      } else {
        EXPECT_LE(differ, kBlends.contains(operation) ? 3 : 0)
            << name << ": of " << theirs.numel() << " bytes; a picture of " << image.sizes();
      }
      EXPECT_TRUE(at::equal(image, before)) << name << " has changed what it was given";
    }
    compared[operation]++;
  }
  for (const auto& [operation, transform] : transforms()) EXPECT_GT(compared[operation], 10) << operation;
}

TEST_F(Transforms, DrawTheBoxesOfTorchvision) {
  for (const auto& row : rows("boxes")) {
    Draws draws(static_cast<uint64_t>(row[0]));
    const auto box = vision::draw_box({.smallest = row[3], .largest = row[4], .narrowest = row[5], .widest = row[6]},
                                      {.height = whole(row[1]), .width = whole(row[2])}, draws);
    EXPECT_EQ(values_of(box), values_of(box_of(row, 7))) << "seed " << row[0];
  }
  for (const auto& row : rows("cuts")) {
    Draws draws(static_cast<uint64_t>(row[0]));
    const auto box = vision::draw_cut({.height = whole(row[1]), .width = whole(row[2])}, row[3], draws);
    EXPECT_EQ(values_of(box), values_of(box_of(row, 4))) << "seed " << row[0];
  }
}

TEST_F(Transforms, MixBatchesAsTorchvision) {
  const auto inputs = file().read("mix/inputs"), labels = file().read("mix/labels");
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const auto laid = inputs.contiguous(format);
    const auto up = vision::mixup(laid, labels, 4, 0.3);
    EXPECT_TRUE(at::allclose(up.inputs, file().read("mixup/inputs"), 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(up.targets, file().read("mixup/targets"), 1e-6, 1e-6));
    EXPECT_EQ(up.inputs.strides(), laid.strides());
    const auto cut = vision::cutmix(laid, labels, 4, {.top = 3, .left = 2, .height = 4, .width = 10});
    EXPECT_TRUE(at::equal(cut.inputs, file().read("cutmix/inputs")));
    EXPECT_TRUE(at::allclose(cut.targets, file().read("cutmix/targets"), 1e-6, 1e-6));
    EXPECT_TRUE(at::equal(laid, inputs));
  }
}

at::Tensor noise(int64_t height, int64_t width) {
  torch::manual_seed(3);
  return packed(at::randint(0, 256, {3, height, width}, at::kByte));
}

TEST(Normalize, WritesIntoPlacesOfAnyStrides) {
  const auto image = noise(35, 51);
  const auto mean = torch::tensor({0.485, 0.456, 0.406}).view({3, 1, 1}), deviation = torch::tensor({0.229, 0.224, 0.225}).view({3, 1, 1});
  const auto expected = (image.to(at::kFloat) / 255 - mean) / deviation;
  auto batch = at::full({2, 3, 40, 60}, 7.F), with_gaps = at::full({3, 35, 102}, 7.F);
  const std::vector<at::Tensor> places = {
      at::empty({3, 35, 51}),
      at::empty({35, 51, 3}).permute({2, 0, 1}),
      at::empty({51, 35, 3}).permute({2, 1, 0}),
      batch.select(0, 1).slice(1, 2, 37).slice(2, 4, 55),
      at::full({2, 3, 40, 60}, 7.F).contiguous(at::MemoryFormat::ChannelsLast).select(0, 1).slice(1, 2, 37).slice(2, 4, 55),
      with_gaps.slice(2, 0, 102, 2),
  };
  for (const auto& place : places) {
    vision::normalize_into(image, {}, place);
    EXPECT_TRUE(at::allclose(place, expected, 1e-6, 1e-6)) << place.strides();
  }
  EXPECT_TRUE((batch.select(0, 0) == 7).all().item<bool>());
  EXPECT_EQ((batch == 7).sum().item<int64_t>(), batch.numel() - image.numel());
  EXPECT_TRUE((with_gaps.slice(2, 1, 102, 2) == 7).all().item<bool>());
}

TEST(Crop, IsAViewWithinTheImage) {
  const auto image = noise(12, 10);
  EXPECT_TRUE(vision::crop(image, {.top = 2, .left = 3, .height = 4, .width = 5}).is_alias_of(image));
  EXPECT_TRUE((vision::crop(image, {.top = 20, .left = -9, .height = 4, .width = 5}) == 0).all().item<bool>());
}

TEST(Draws, AreTheSameEverywhere) {
  Draws draws(5), again(5), others(6);
  std::set<int64_t> seen;
  for (int i = 0; i < 100; i++) {
    const auto one = draws.below(1'000'000'000);
    EXPECT_EQ(one, again.below(1'000'000'000));
    EXPECT_NE(one, others.below(1'000'000'000));
    seen.insert(one);
  }
  EXPECT_EQ(seen.size(), 100U);
  Draws zero(0);  // computed by hand
  EXPECT_EQ(zero.below(1'000'000), 947055);
  EXPECT_EQ(zero.below(1'000'000), 570654);
}

TEST(Draws, AreUniform) {
  Draws draws(1);
  constexpr int kCount = 20000;
  double sum = 0, squares = 0;
  int chances = 0;
  std::array<int, 7> numbers = {};
  for (int i = 0; i < kCount; i++) {
    const double value = draws.uniform(-1, 3);
    EXPECT_GE(value, -1);
    EXPECT_LT(value, 3);
    sum += value;
    squares += value * value;
    numbers.at(static_cast<size_t>(draws.below(7)))++;
    if (draws.chance(0.3)) chances++;
  }
  EXPECT_NEAR(sum / kCount, 1, 0.04);
  EXPECT_NEAR(squares / kCount, 1 + 16. / 12, 0.08);
  EXPECT_NEAR(static_cast<double>(chances) / kCount, 0.3, 0.015);
  EXPECT_THAT(numbers, ::testing::Each(::testing::AllOf(::testing::Gt(kCount / 7 - 250), ::testing::Lt(kCount / 7 + 250))));
  EXPECT_THAT(message_of<UsageError>([&] { draws.below(0); }), HasSubstr("there is no number from 0 to -1"));
}

TEST(RandomResizedCrop, HasAreasAndShapesWithinItsLimits) {
  const ImageSize image = {.height = 1000, .width = 1200};
  double areas = 0, tops = 0;
  constexpr int kCount = 4000;
  for (int seed = 0; seed < kCount; seed++) {
    Draws draws(static_cast<uint64_t>(seed));
    const auto box = vision::draw_box({}, image, draws);
    EXPECT_GE(box.top, 0);
    EXPECT_GE(box.left, 0);
    EXPECT_LE(box.top + box.height, image.height);
    EXPECT_LE(box.left + box.width, image.width);
    const double area = static_cast<double>(box.height * box.width) / static_cast<double>(image.height * image.width);
    const double ratio = static_cast<double>(box.width) / static_cast<double>(box.height);
    EXPECT_GT(area, 0.0795);
    EXPECT_LE(area, 1);
    EXPECT_GT(ratio, 0.747);
    EXPECT_LT(ratio, 1.338);
    areas += area;
    if (box.height < image.height) tops += static_cast<double>(box.top) / static_cast<double>(image.height - box.height);
  }
  EXPECT_NEAR(areas / kCount, 0.46, 0.02);  // less than the middle of 0.08 and 1, because large parts do not always fit
  EXPECT_NEAR(tops / kCount, 0.5, 0.03);
}

TEST(RandomResizedCrop, TakesTheMiddleWhereNothingFits) {
  Draws draws(1);
  const auto of_high = vision::draw_box({}, {.height = 1000, .width = 20}, draws);
  EXPECT_EQ(values_of(of_high), (std::array<int64_t, 4>{486, 0, 27, 20}));
  const auto of_wide = vision::draw_box({}, {.height = 30, .width = 4000}, draws);
  EXPECT_EQ(values_of(of_wide), (std::array<int64_t, 4>{0, 1980, 30, 40}));
}

TEST(TransformErrors, NameWhatIsWrong) {
  const auto image = noise(8, 9);
  Draws draws(1);
  const auto expect = [](const auto& act, const std::string& part) { EXPECT_THAT(message_of<UsageError>(act), HasSubstr(part)); };
  expect([&] { vision::flip(image.to(at::kFloat)); }, "bytes {3, height, width}, and not for Float [3, 8, 9] on cpu");
  expect([&] { vision::flip(image.slice(0, 0, 1)); }, "and not for Byte [1, 8, 9]");
  expect([&] { vision::resize(image, {.height = 0, .width = 3}); }, "can't become 0 by 3");
  expect([&] { vision::crop(image, {.height = 0, .width = 3}); }, "no part of an image of 0 by 3");
  expect([&] { vision::resized_shorter_side({.height = 8, .width = 9}, 0); }, "can't become 0");
  expect([&] { vision::adjust_contrast(image, -0.5); }, "the contrast of an image can't be multiplied by -0.5");
  expect([&] { vision::adjust_hue(image, 0.6); }, "can't be turned by 0.6");
  expect([&] { vision::jitter(image, {.hue = 0.7}, draws); }, "hue 0.7");
  expect([&] { vision::augment(image, vision::AugmentOperation::Posterize, 9); }, "9 bits");
  expect([&] { vision::rand_augment(image, {.magnitude = 31}, draws); }, "magnitude 31; magnitudes are from 0 to 30");
  expect([&] { vision::draw_box({.smallest = 0.5, .largest = 0.4}, {.height = 8, .width = 9}, draws); },
         "from 0.5 to 0.4 of an image's area");
  expect([&] { vision::draw_box({.narrowest = 2, .widest = 1}, {.height = 8, .width = 9}, draws); }, "from 2 to 1 times as wide as high");
  expect([&] { vision::normalize_into(image, {}, at::empty({3, 8, 8})); }, "[3, 8, 9] can't become numbers in Float [3, 8, 8]");
  expect([&] { vision::normalize_into(image, {.deviation = {1, 0, 1}}, at::empty({3, 8, 9})); }, "the deviation of channel 1 is 0");
}

}  // namespace
}  // namespace tessera::testing::transforms_test
