// Tensors are read back with the same bits, and damaged files are refused with a message that says what is wrong.
#include "tessera/checkpoint/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/same_tensors.h"
#include "tests/testing/transports.h"

namespace tessera::testing::safetensors_test {
namespace {

using checkpoint::SafetensorsEntry;
using checkpoint::SafetensorsFile;
using checkpoint::SafetensorsWriter;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

void save(const std::filesystem::path& path, const Named& tensors, const std::map<std::string, std::string>& metadata = {}) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  SafetensorsWriter writer(path, entries, metadata);
  for (const auto& [name, tensor] : tensors) writer.write(tensor);
  writer.close();
}

/// A file with this header, and with the header's length unless another one is given.
std::string file_of(const std::string& header, size_t data_bytes, std::optional<uint64_t> length = {}) {
  const uint64_t number = length.value_or(header.size());
  return std::string(reinterpret_cast<const char*>(&number), sizeof number) + header + std::string(data_bytes, '\1');
}

std::string refusal(const std::filesystem::path& path) {
  return message_of<IoError>([&] { SafetensorsFile file(path); });
}

TEST(Safetensors, KeepsEveryDtypeAndShape) {
  const Folder folder;
  Named tensors;
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors.emplace_back(c10::toString(dtype), at::arange(-3, 3).to(dtype).view({2, 3}));
  }
  tensors.emplace_back("a scalar", at::scalar_tensor(5));
  tensors.emplace_back("empty", at::empty({4, 0, 2}));
  tensors.emplace_back("transposed", at::arange(6).view({2, 3}).t());
  tensors.emplace_back("größe \"\\\n", at::full({1}, NAN));
  tensors.emplace_back("empty at the end", at::empty({0}));
  save(folder / "a", tensors, {{"who", "we"}});
  const SafetensorsFile file(folder / "a");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"who", "we"}}));
  ASSERT_EQ(file.names().size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); i++) {
    const auto& [name, tensor] = tensors[i];
    ASSERT_TRUE(file.contains(name)) << name;
    const auto read = file.read(name);
    EXPECT_EQ(read.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(read.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(same_values(read.nan_to_num(-1), tensor.nan_to_num(-1))) << name;
  }
  EXPECT_THAT(message_of<IoError>([&] { file.read("gone"); }), HasSubstr("'gone'"));
}

TEST(Safetensors, KeepsNothingAtAll) {
  const Folder folder;
  save(folder / "a", {});
  EXPECT_TRUE(SafetensorsFile(folder / "a").names().empty());
}

TEST(Safetensors, RefusesAFileThatEndsTooEarlyOrTooLate) {
  const Folder folder;
  save(folder / "a", {{"x", at::arange(3)}, {"y", at::ones({2})}});
  const auto whole = read_file(folder / "a");
  for (size_t length = 0; length < whole.size(); length++) {
    write_file(folder / "b", whole.substr(0, length));
    EXPECT_THAT(refusal(folder / "b"), HasSubstr((folder / "b").string())) << length;
  }
  write_file(folder / "b", whole + "x");
  EXPECT_THAT(refusal(folder / "b"), HasSubstr("its tensors have 32 bytes, but 33 are there"));
}

TEST(Safetensors, RefusesHeadersThatLie) {
  const Folder folder;
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  const auto good = tensor(R"("I8")", "[4]", "[0,4]");
  const std::pair<std::string, std::string> attacks[] = {
      {R"([1])", "does not begin with '{'"},
      {R"({"x":)", "is damaged"},
      {R"({"x":3})", "'x' is 3 instead of an object"},
      {R"({"x":{"dtype":"I8","shape":[4]}})", "tensor 'x' has no dtype, shape or data_offsets"},
      {R"({"x":)" + good + R"(,"x":)" + good + "}", "'x' occurs twice"},
      {R"({"x":)" + tensor(R"("F4")", "[4]", "[0,4]") + "}", "tensor 'x' has the dtype \"F4\""},
      {R"({"x":)" + tensor("7", "[4]", "[0,4]") + "}", "tensor 'x' has 7 where a dtype"},
      {R"({"x":)" + tensor(R"("I8")", "[-4]", "[0,4]") + "}", "has -4 where a dtype, a shape"},
      {R"({"x":)" + tensor(R"("I8")", "[4.0]", "[0,4]") + "}", "has 4.0 where a dtype"},
      {R"({"x":)" + tensor(R"("I8")", "4", "[0,4]") + "}", "has 4 where a dtype, a shape or data_offsets should be (at 'shape')"},
      {R"({"x":)" + tensor(R"("I8")", "[4]", "[0,4,4]") + "}", "3 data_offsets"},
      {R"({"x":)" + tensor(R"("I8")", "[4]", "[4,0]") + "}", "from byte 4 to 0"},
      {R"({"x":)" + tensor(R"("I8")", "[5]", "[0,4]") + "}", "should have 5 bytes"},
      {R"({"x":)" + tensor(R"("I16")", "[4]", "[0,4]") + "}", "should have 8 bytes"},
      {R"({"x":)" + tensor(R"("I8")", "[4]", "[1,5]") + "}", "begins at byte 1"},
      {R"({"x":)" + tensor(R"("I8")", "[4]", "[9223372036854775800,9223372036854775804]") + "}", "begins at byte 9223372036854775800"},
      {R"({"x":)" + tensor(R"("I8")", "[4]", "[0,18446744073709551615]") + "}", "has 18446744073709551615 where"},
      {R"({"x":)" + tensor(R"("I8")", "[4294967296,4294967296,4]", "[0,4]") + "}", "too many bytes"},
      {R"({"x":)" + good + R"(,"y":)" + good + "}", "begins at byte 0 of the data, the one before ends at 4"},
      {R"({"x":)" + tensor(R"("I8")", "[2]", "[0,2]") + R"(,"y":)" + tensor(R"("I8")", "[1]", "[3,4]") + "}", "begins at byte 3"},
      {R"({"__metadata__":[1],"x":)" + good + "}", "metadata"},
      {R"({"__metadata__":{"a":1},"x":)" + good + "}", "metadata 'a' is 1 instead of a text"},
      {R"({"x":)" + good + "} trailing", "is damaged"},
      {"{\"\xff\":" + good + "}", "is damaged"},
      {R"({"__metadata__":{"a":"1","a":"2"},"x":)" + good + "}", "metadata 'a' occurs twice"},
      {R"({"x":{"dtype":"I8","dtype":"I8","shape":[4],"data_offsets":[0,4]}})", "tensor 'x' has a text where"},
      {R"({"x":)" + tensor(R"("I8")", "[4611686018427387904,4611686018427387904,0]", "[0,0]") + "}", "too many bytes"},
      {R"({"__metadata__":{"xxh3_64":"0123"},"x":)" + good + "}", "checksums have 4 digits"},
      {"{\"x\":" + std::string(1'000'000, '['), "is damaged"},
      {R"({"x":{"dtype":)" + std::string(1'000'000, '['), "is damaged"},
      {std::string(1'000'000, '{'), "is damaged"},
  };
  for (const auto& [header, words] : attacks) {
    write_file(folder / "a", file_of(header, 4));
    EXPECT_THAT(refusal(folder / "a"), AllOf(HasSubstr((folder / "a").string()), HasSubstr(words)));
  }
  write_file(folder / "a", file_of(R"({"x":)" + good + "}   ", 4));
  EXPECT_THAT(SafetensorsFile(folder / "a").names(), ElementsAre("x"));
  for (const uint64_t length : {uint64_t{1} << 62, UINT64_MAX}) {
    write_file(folder / "a", file_of("{}", 4, length));
    EXPECT_THAT(refusal(folder / "a"), HasSubstr("does not begin with the length of a header"));
  }
  write_file(folder / "a", file_of("{}", 4, 200));
  EXPECT_THAT(refusal(folder / "a"), HasSubstr("cut off"));
  EXPECT_THAT(refusal(folder / "none"), HasSubstr("No such file"));
  EXPECT_THAT(refusal(folder.path()), HasSubstr("is not a file"));
}

TEST(Safetensors, NamesTheTensorWhoseBytesHaveChanged) {
  const Folder folder;
  save(folder / "a", {{"first", at::arange(10)}, {"second", at::arange(1'000'000, at::kFloat)}, {"empty", at::empty({0})}},
       {{"lr", "0.1"}});
  const auto bytes = read_file(folder / "a");
  const auto trouble = [&](size_t place) {
    auto changed = bytes;
    changed[place] = static_cast<char>(changed[place] ^ 4);
    write_file(folder / "b", changed);
    return message_of<IoError>([&] {
      const SafetensorsFile file(folder / "b");
      for (const auto& name : {"first", "empty"}) file.verify(name);
      file.read("second");
    });
  };
  const auto data = bytes.size() - 4'000'000 - 80;
  EXPECT_THAT(trouble(data + 17), HasSubstr("b is damaged: the bytes of 'first' are not those that were written"));
  EXPECT_THAT(trouble(data + 80), HasSubstr("the bytes of 'second'"));
  EXPECT_THAT(trouble(bytes.size() - 1), HasSubstr("the bytes of 'second'"));
  for (const auto* const text : {"0.1", "\"lr\"", "second", "xxh3_64\":\""}) {
    EXPECT_THAT(trouble(bytes.find(text) + std::string_view(text).size() - 1), HasSubstr("the header of")) << text;
  }
  EXPECT_TRUE(SafetensorsFile(folder / "a").has_checksum("empty"));
}

TEST(Safetensors, LeavesNothingOfAFileThatWasNotClosed) {
  const Folder folder;
  const std::vector<SafetensorsEntry> entries = {{.name = "x", .dtype = at::kFloat, .sizes = {2}},
                                                 {.name = "y", .dtype = at::kFloat, .sizes = {}}};
  {
    SafetensorsWriter writer(folder / "a", entries);
    writer.write(at::ones({2}));
    EXPECT_THAT(message_of<UsageError>([&] { writer.write(at::ones({2})); }), HasSubstr("'y', Float of [], but was given Float of [2]"));
    EXPECT_THAT(message_of<UsageError>([&] { writer.close(); }), HasSubstr("1 of 2 tensors; 'y' is missing"));
    EXPECT_TRUE(std::filesystem::exists(folder / "a.part"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_THAT(message_of<UsageError>([&] { save(folder / "a", {{"x", at::ones(1)}, {"x", at::ones(1)}}); }), HasSubstr("name 'x'"));
  EXPECT_THAT(message_of<UsageError>([&] { save(folder / "a", {{"x", at::ones(1, at::kComplexDouble)}}); }), HasSubstr("ComplexDouble"));
  EXPECT_THAT(message_of<IoError>([&] { save(folder / "no/a", {}); }), HasSubstr("No such file or directory"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(Safetensors, KeepsTheOldFileWhenTheDiskIsFull) {
  const Folder folder;
  save(folder / "a", {{"x", at::zeros({1})}});
  {
    const FullDisk full(10'000);
    EXPECT_THAT(message_of<IoError>([&] { save(folder / "a", {{"x", at::ones({5'000})}}); }),
                AllOf(HasSubstr("can't write"), HasSubstr("File too large")));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "a.part"));
  EXPECT_TRUE(same_values(SafetensorsFile(folder / "a").read("x"), at::zeros({1})));
}

}  // namespace
}  // namespace tessera::testing::safetensors_test
