#include "tessera/vision/tar_shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tests/testing/folder.h"
#include "tests/testing/image_files.h"
#include "tests/testing/transports.h"

namespace tessera::testing::tar_shards_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using vision::expand_braces;
using vision::read_tar_shards;

TEST(TarShards, FindsPairsInAllArchives) {
  const Folder folder;
  write_file(folder / "0.tar", tar_of({{"./a.jpg", "A"},
                                       {"./a.cls", "3\n"},
                                       {"b.json", "{}"},
                                       {"._b.cls", "no"},
                                       {"b.cls", "0"},
                                       {"._b.PNG", "no"},
                                       {"b.seg.png", "no"},
                                       {"b.PNG", "B"},
                                       {"README", "no"},
                                       {"._c.jpg", "no"}}));
  write_file(folder / "1.tar", tar_of({{"x.y/a.cls", " 1 "}, {"x.y/a.webp", "C"}, {"x.y/b.txt", "no"}}));
  write_file(folder / "2.tar", tar_of({{"/\x1b.jpg", "D"}, {"/\x1b.cls", "0"}}));
  EXPECT_EQ(read_tar_shards({folder / "2.tar"}).name(0), (folder / "2.tar").string() + "//\\x1b.jpg");
  const auto images = read_tar_shards(expand_braces((folder / "{0..1}.tar").string()));
  EXPECT_THAT(images.classes, ElementsAre("0", "1", "2", "3"));
  EXPECT_THAT(images.labels, ElementsAre(3, 0, 1));
  std::string buffer, all;
  for (int64_t i = 0; i < images.size(); i++) all += std::string(images.read(i, buffer)) + " ";
  EXPECT_EQ(all, "A B C ");
  EXPECT_EQ(images.name(2), (folder / "1.tar/x.y/a.webp").string());
  const auto swapped = read_tar_shards({folder / "1.tar", folder / "0.tar"});
  EXPECT_THAT(swapped.labels, ElementsAre(1, 3, 0));
  EXPECT_NE(swapped.fingerprint(), images.fingerprint());
  std::filesystem::resize_file(folder / "0.tar", 700);
  EXPECT_THAT(message_of<IoError>([&] { images.read(1, buffer); }), HasSubstr("0.tar"));
}

TEST(TarShards, WarnsOfClassesWithoutPictures) {
  const Folder folder;
  std::string logged;
  const auto before = set_log_sink([&](const LogRecord& record) { logged += record.text; });
  write_file(folder / "0.tar", tar_of({{"a.jpg", "A"}, {"a.cls", "0"}, {"b.jpg", "B"}, {"b.cls", "1"}}));
  EXPECT_EQ(read_tar_shards({folder / "0.tar"}).classes.size(), 2);
  EXPECT_EQ(logged, "");
  write_file(folder / "1.tar", tar_of({{"c.jpg", "C"}, {"c.cls", "99"}}));
  EXPECT_EQ(read_tar_shards({folder / "0.tar", folder / "1.tar"}).classes.size(), 100);
  set_log_sink(before);
  EXPECT_THAT(logged,
              AllOf(HasSubstr("0.tar"), HasSubstr("have 100 classes"), HasSubstr("but no picture of '2', '3', "), HasSubstr("more")));
}

TEST(TarShards, SaysWhatIsWrongWithAnArchive) {
  const Folder folder;
  const auto path = folder / "x.tar";
  const auto refusal = [&](const std::vector<std::pair<std::string, std::string>>& files) {
    write_file(path, tar_of(files));
    const auto message = message_of<IoError>([&] { read_tar_shards({path}); });
    EXPECT_THAT(message, HasSubstr(path.string()));
    return message;
  };
  EXPECT_THAT(refusal({}), HasSubstr("has no picture"));
  EXPECT_THAT(refusal({{"a.txt", "b"}}), HasSubstr("has no picture"));
  EXPECT_THAT(refusal({{"a.jpg", "A"}, {"b.cls", "1"}, {"b.jpg", "B"}}), HasSubstr("at byte 512: 'a.jpg' has no label (.cls) beside it"));
  EXPECT_THAT(refusal({{"a.jpg", "A"}, {"a.cls", "1"}, {"b.cls", "1"}, {"b.bmp", "B"}}), HasSubstr("'b.cls' has no picture (.jpg, "));
  EXPECT_THAT(refusal({{"a.jpg", "A"}, {"b.jpg", "B"}, {"a.cls", "1"}, {"b.cls", "1"}}), HasSubstr("stand one behind the other"));
  EXPECT_THAT(refusal({{"a.jpg", "A"}, {"a.png", "A"}, {"a.cls", "1"}}), HasSubstr("'a.jpg' and 'a.png' are two of one key"));
  for (const auto* const label : {"", "x", "-1", "1.5", "1 2", "99999999999", "100000000000000000000000000001", "\x1b"})
    EXPECT_THAT(refusal({{"a.jpg", "A"}, {"a.cls", label}}), HasSubstr("'a.cls' has no number of a class from 0 to 1048575, but '"))
        << label;
  write_file(path, tar_of({{"a.jpg", "A"}, {"a.cls", "1"}}).substr(0, 1800));
  EXPECT_THAT(message_of<IoError>([&] { read_tar_shards({path}); }), HasSubstr("x.tar, at byte 1800: the archive is cut off"));
  EXPECT_THAT(message_of<IoError>([&] { read_tar_shards({folder / "y.tar"}); }), HasSubstr("did you mean"));
  EXPECT_THAT(message_of<UsageError>([] { read_tar_shards({}); }), HasSubstr("expand_braces(\"train-{000..146}.tar\")"));
}

std::vector<std::string> expanded(std::string_view pattern) {
  std::vector<std::string> texts;
  for (const auto& file : expand_braces(pattern)) texts.push_back(file.string());
  return texts;
}

TEST(TarShards, ExpandsBracesAsBashDoes) {
  EXPECT_THAT(expanded("plain.tar"), ElementsAre("plain.tar"));
  EXPECT_THAT(expanded("x-{008..010}.tar"), ElementsAre("x-008.tar", "x-009.tar", "x-010.tar"));
  EXPECT_THAT(expanded("{9..11}"), ElementsAre("9", "10", "11"));
  EXPECT_EQ(expanded("{1..010}").back(), "010");
  EXPECT_THAT(expanded("{2..0}"), ElementsAre("2", "1", "0"));
  EXPECT_THAT(expanded("{a,b}/{0..1}"), ElementsAre("a/0", "a/1", "b/0", "b/1"));
  EXPECT_THAT(expanded("x{,.old,{1..2}}"), ElementsAre("x", "x.old", "x1", "x2"));
  for (const auto* const wrong : {"x{0..9", "x{y}", "{}", "{1..2}{"}) EXPECT_THROW(expand_braces(wrong), UsageError) << wrong;
  EXPECT_THAT(message_of<UsageError>([] { expand_braces("{a}"); }), HasSubstr("{a} is not a range such as {000..146}"));
  EXPECT_THAT(message_of<UsageError>([] { expand_braces("{0..99999999}"); }), HasSubstr("too many files"));
  EXPECT_THAT(message_of<UsageError>([] { expand_braces("{0..9999}{0..9999}"); }), HasSubstr("too many files"));
}

}  // namespace
}  // namespace tessera::testing::tar_shards_test
