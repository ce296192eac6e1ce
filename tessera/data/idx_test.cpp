#include "tessera/data/idx.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <fstream>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::data::idx_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using namespace std::string_literals;

class Idx : public ::testing::Test {
 protected:
  ~Idx() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& name, const std::string& bytes) const { std::ofstream(folder_ / name, std::ios::binary) << bytes; }
  static std::string packed(const std::string& bytes) {
    const auto path = std::filesystem::temp_directory_path() / ("tessera-packed-" + std::to_string(::getpid()));
    auto* const file = ::gzopen(path.c_str(), "wb");
    ::gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    ::gzclose(file);
    std::ifstream stream(path, std::ios::binary);
    std::string result(std::istreambuf_iterator<char>(stream), {});
    std::filesystem::remove(path);
    return result;
  }
  std::string refusal_of_file(const std::string& bytes) const {
    write("file", bytes);
    const auto message = message_of<IoError>([&] { read_idx(folder_ / "file"); });
    EXPECT_THAT(message, HasSubstr((folder_ / "file").string()));
    return message;
  }
  std::string refusal_of_folder() const {
    return message_of<IoError>([&] { read_idx_folder(folder_); });
  }

  const std::filesystem::path folder_ = [] {
    auto path = std::filesystem::temp_directory_path() / ("tessera-idx-" + std::to_string(::getpid()));
    std::filesystem::create_directories(path);
    return path;
  }();
};

const std::string kImages = "\0\0\x08\x03\0\0\0\x03\0\0\0\x01\0\0\0\x02"s + "abcdef";  // three of 1 x 2
const std::string kLabels = "\0\0\x08\x01\0\0\0\x03"s + "\x07\x08\xff";

TEST_F(Idx, ReadsFilesPlainAndPackedUnderTheirUsualNames) {
  write("train-images-idx3-ubyte", kImages);
  write("train-labels-idx1-ubyte", kLabels);
  write("t10k-images.idx3-ubyte.gz", packed(kImages));
  write("t10k-labels.idx1-ubyte.gz", packed(kLabels));
  for (const auto split : {Split::Train, Split::Test}) {
    const auto samples = read_idx_folder(folder_, split);
    EXPECT_EQ(samples.size(), 3);
    EXPECT_EQ(samples.inputs.scalar_type(), at::kByte);
    EXPECT_TRUE(samples.inputs.equal(at::arange(97, 103, at::kByte).view({3, 1, 2})));
    EXPECT_EQ(samples.targets.scalar_type(), at::kByte);
    EXPECT_EQ(samples.targets[2].item<int>(), 255);
  }
}

TEST_F(Idx, ReadsMoreThanOneBlock) {
  const std::string pixels(3 << 20, 'x');
  write("big", packed("\0\0\x08\x02\0\0\0\x03\0\x10\0\0"s + pixels));
  const auto tensor = read_idx(folder_ / "big");
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{3, 1 << 20}));
  EXPECT_TRUE(tensor.eq('x').all().item<bool>());
}

TEST_F(Idx, SaysWhatIsWrongWithAFile) {
  EXPECT_THAT(refusal_of_file(kImages.substr(0, 20)), HasSubstr("promises 3 x 1 x 2 = 6 bytes, but has 4"));
  EXPECT_THAT(refusal_of_file(kImages + "more"), HasSubstr("promises 3 x 1 x 2 = 6 bytes, but has more"));
  EXPECT_THAT(refusal_of_file(kImages.substr(0, 9)), HasSubstr("ends within its header, after 9 of 16 bytes"));
  EXPECT_THAT(refusal_of_file("<html>"), HasSubstr("begins with [3c, 68, 74, 6d] instead of [00, 00, 08,"));
  EXPECT_THAT(refusal_of_file("\0\0\x0d\x01\0\0\0\x01"s + "1234"), HasSubstr("begins with [00, 00, 0d, 01]"));  // floats
  EXPECT_THAT(refusal_of_file(""), HasSubstr("begins with []"));
  EXPECT_THAT(refusal_of_file("\0\0\x08\x03"s + std::string(12, '\xff') + "x"), HasSubstr("4294967295 x 4294967295 x 4294967295 bytes"));
  EXPECT_THAT(refusal_of_file("\0\0\x08\xff"s + std::string(1020, '\1') + "x"), HasSubstr("it has 255 dimensions"));
  EXPECT_THAT(refusal_of_file("\0\0\x08\x04"s + std::string(4, '\0') + std::string(12, '\xff')), HasSubstr("which no tensor can hold"));
}

TEST_F(Idx, SaysWhenAPackedFileIsDamaged) {
  const auto good = packed(kImages + std::string(1000, 'x'));
  EXPECT_THAT(refusal_of_file(good.substr(0, good.size() - 12)), AllOf(HasSubstr("can't be read"), HasSubstr("unexpected end of file")));
  auto altered = good;
  altered[altered.size() - 6] ^= 1;  // in its check sum
  EXPECT_THAT(refusal_of_file(altered), HasSubstr("incorrect data check"));
}

TEST_F(Idx, SaysWhatItLookedFor) {
  EXPECT_THAT(refusal_of_folder(), AllOf(HasSubstr("has no train-images; looked for train-images-idx3-ubyte, train-images-idx3-ubyte.gz, "
                                                   "train-images.idx3-ubyte, train-images.idx3-ubyte.gz"),
                                         HasSubstr(folder_.string())));
  write("train-images-idx3-ubyte", kImages);
  EXPECT_THAT(refusal_of_folder(), HasSubstr("has no train-labels"));
  EXPECT_THAT(message_of<IoError>([] { read_idx_folder("/no/such/folder"); }), HasSubstr("/no/such/folder does not exist"));
  EXPECT_THAT(message_of<IoError>([] { read_idx("/no/such/file"); }), HasSubstr("/no/such/file: No such file"));
  EXPECT_THAT(message_of<IoError>([&] { read_idx(folder_); }), HasSubstr("directory"));
}

TEST_F(Idx, ComparesImagesAndLabels) {
  write("train-images-idx3-ubyte", kImages);
  write("train-labels-idx1-ubyte", "\0\0\x08\x01\0\0\0\x02"s + "12");
  EXPECT_THAT(refusal_of_folder(), AllOf(HasSubstr("images-idx3-ubyte has 3 images, but"), HasSubstr("labels-idx1-ubyte has 2 labels")));
  write("train-labels-idx1-ubyte", kImages);
  EXPECT_THAT(refusal_of_folder(), HasSubstr("labels-idx1-ubyte has 3 dimensions (3 x 1 x 2) instead of 1"));
}

}  // namespace
}  // namespace tessera::data::idx_test
