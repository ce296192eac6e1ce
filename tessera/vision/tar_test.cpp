#include "tessera/vision/tar.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/image_files.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::testing::tar_test {
namespace {

using ::testing::HasSubstr;
using vision::TarMember;

const std::string kEnd(1024, '\0');

/// The members of an archive in memory. What is read beyond its end fails the test.
std::vector<TarMember> members_of(const std::string& archive) {
  const InputFile file("x.tar", archive.size(), [&](void* to, uint64_t count, uint64_t offset) {
    if (offset > archive.size() || count > archive.size() - offset) throw std::logic_error("beyond the end");
    std::memcpy(to, archive.data() + offset, count);
  });
  return vision::members_of_tar(file);
}

std::string refusal_of(const std::string& archive) {
  return message_of<IoError>([&] { members_of(archive); });
}

std::string names_in(const std::string& archive) {
  std::string names;
  for (const auto& member : members_of(archive)) names += member.name + "=" + archive.substr(member.offset, member.size) + " ";
  return names;
}

TEST(Tar, FindsWhatPythonWrites) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/tar_files.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << written.output;
  ASSERT_EQ(written.status, 0) << written.output;
  std::string found;
  for (const auto* const form : {"ustar", "gnu", "pax"}) {
    for (const auto& member : vision::members_of_tar(InputFile(folder / (std::string(form) + ".tar"))))
      found += fmt::format("{}\t{}\t{}\t{}\n", form, member.offset, member.size, member.name);
  }
  EXPECT_EQ(found, written.output);
}

TEST(Tar, ReadsNumbersAndNamesInAllTheirForms) {
  const auto padded = [](std::string bytes) {
    bytes.resize(512);
    return bytes;
  };
  const auto binary = std::string("\x80", 1) + std::string(10, '\0') + "\3";
  EXPECT_EQ(names_in(tar_header("a", binary) + padded("abc") + kEnd), "a=abc ");
  EXPECT_EQ(names_in(tar_header("a", "     3 ") + padded("abc") + kEnd), "a=abc ");
  EXPECT_EQ(names_in(tar_header("old", "00000000003", '\0', "") + padded("abc") + kEnd), "old=abc ");
  EXPECT_EQ(names_in(tar_member("folder/", "") + tar_member("d", "", '5') + tar_member("x", "1") + kEnd), "x=1 ");
  EXPECT_EQ(names_in(tar_member("all", "15 comment=abc\n", 'g') + tar_member("x", "1") + kEnd), "x=1 ");
  const auto named = tar_member("meta", "9 path=n\n10 size=2\n", 'x');
  EXPECT_EQ(names_in(named + tar_header("a", "0") + padded("bcd") + tar_member("e", "f") + kEnd), "n=bc e=f ");
  EXPECT_EQ(names_in(tar_member("././@LongLink", std::string("long\0", 5), 'L') + tar_member("a", "b") + kEnd), "long=b ");
  EXPECT_EQ(names_in(kEnd), "");
}

TEST(Tar, ReadsOnceForEachPair) {
  std::string archive;
  constexpr int kPairs = 20;
  for (int i = 0; i < kPairs; i++) archive += tar_member("a.jpg", std::string(10'000, 'p')) + tar_member("a.cls", std::to_string(i));
  archive += kEnd;
  int reads = 0;
  const InputFile file("x.tar", archive.size(), [&](void* to, uint64_t count, uint64_t offset) {
    std::memcpy(to, archive.data() + offset, count);
    reads++;
  });
  const auto members = vision::members_of_tar(file);
  EXPECT_EQ(reads, kPairs + 1);
  EXPECT_EQ(members.at(0).beginning, "ppppppppppppppp");
  EXPECT_EQ(members.at(39).beginning, "19");
}

TEST(Tar, SaysWhereAnArchiveIsDamaged) {
  const auto good = tar_member("a", "1") + tar_member("b", std::string(600, '2')) + kEnd;
  EXPECT_THAT(refusal_of(good.substr(0, 2560)), HasSubstr("x.tar, at byte 2560: the archive is cut off"));
  EXPECT_THAT(refusal_of(good.substr(0, 1200)), HasSubstr("at byte 1024: the archive is cut off"));
  EXPECT_THAT(refusal_of(good.substr(0, 2000)), HasSubstr("at byte 1024: 'b' has 600 bytes, but the archive is cut off 464 bytes behind"));
  EXPECT_THAT(refusal_of(""), HasSubstr("cut off"));
  EXPECT_THAT(refusal_of(good + good), HasSubstr("at byte 3584: the archive has ended, but there is more"));
  auto altered = good;
  altered[1024] = 'x';
  EXPECT_THAT(refusal_of(altered), HasSubstr("at byte 1024: the header has another check sum"));
  EXPECT_THAT(refusal_of(std::string(600, 'x')), HasSubstr("this is not a tar archive"));
  EXPECT_THAT(refusal_of("\x1f\x8b" + std::string(600, 'x')), HasSubstr("the archive is compressed; unpack it"));
  EXPECT_THAT(refusal_of(tar_header("a", "77777777777") + kEnd), HasSubstr("'a' has 8589934591 bytes"));
  EXPECT_THAT(refusal_of(tar_header("a", "\x80" + std::string(11, '\xff')) + kEnd), HasSubstr("no size that can be read"));
  EXPECT_THAT(refusal_of(tar_header("a", "12x") + kEnd), HasSubstr("no size that can be read"));
}

TEST(Tar, LeavesOutNoFileWithoutAWord) {
  EXPECT_THAT(refusal_of(tar_member("a\x1b", "", '2') + kEnd), HasSubstr("'a\\x1b' is a link"));
  EXPECT_THAT(refusal_of(tar_member("a", "", '1') + kEnd), HasSubstr("--hard-dereference"));
  EXPECT_THAT(refusal_of(tar_member("a", "", 'S') + kEnd), HasSubstr("'a' is a member of type 'S'"));
  const auto of_pax = [](const std::string& records) { return refusal_of(tar_member("m", records, 'x') + tar_member("a", "b") + kEnd); };
  EXPECT_THAT(of_pax("22 GNU.sparse.major=1\n"), HasSubstr("packed without its zeros"));
  for (const auto* const damaged : {"9 path=n", "x path=n\n", "2 path=n\n", "99 path=n\n", "-9 path=n\n", "8 pathn\n\n", "path=n\n", "1 "})
    EXPECT_THAT(of_pax(damaged), HasSubstr("at byte 0: a record of pax is damaged")) << damaged;
  EXPECT_THAT(of_pax("10 size=x\n"), HasSubstr("says no size"));
  EXPECT_THAT(refusal_of(tar_member("m", std::string(2 << 20, 'n'), 'L') + kEnd), HasSubstr("has 2097152 bytes, which is too long"));
}

TEST(Tar, EndsWithMembersOrAnErrorWhateverItReads) {
  const auto good =
      tar_member("meta", "9 path=n\n", 'x') + tar_member("a", "1") + tar_member("l", "long", 'L') + tar_member("b", "22") + kEnd;
  for (size_t length = 0; length < good.size() - 512; length++)
    EXPECT_THAT(refusal_of(good.substr(0, length)), HasSubstr("x.tar, at byte"));
  for (size_t place = 0; place < good.size(); place++) {
    for (const int bit : {0, 3, 7}) {
      auto altered = good;
      altered[place] = static_cast<char>(altered[place] ^ (1 << bit));
      try {
        for (const auto& member : members_of(altered)) {
          EXPECT_LE(member.offset, altered.size());
          EXPECT_LE(member.size, altered.size() - member.offset);
        }
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr("x.tar, at byte"));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing::tar_test
