#include "tessera/vision/image_folder.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::testing::image_folder_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Makes files below a folder, which have their own paths in them.
void make_files(const Folder& folder, const std::vector<std::string>& paths) {
  for (const auto& path : paths) {
    std::filesystem::create_directories((folder / path).parent_path());
    write_file(folder / path, path);
  }
}

std::string refusal_of(const std::filesystem::path& folder) {
  return message_of<IoError>([&] { vision::read_image_folder(folder); });
}

TEST(ImageFolder, HasTheOrderOfTorchvision) {
  const Folder folder;
  make_files(folder,
             {"cat/2.jpg", "cat/10.JPG", "cat/x/1.png", "cat/x-y/1.png", "cat/x/z/1.webp", "cat/x/notes.txt", "cat/.jpg", "Dog/b.jpeg",
              "Dog/a.JpEg", "Dog/Z.png", "é/1.jpg", "z/1.jpg", "10/1.jpg", "9/1.jpg", "9/in.jpg/1.png", "README.md", "loose.jpg"});
  std::filesystem::create_directory_symlink(folder / "cat", folder / "linked");
  std::filesystem::create_symlink(folder / "z/1.jpg", folder / "z/linked.png");
  std::filesystem::create_symlink(folder / "nowhere", folder / "gone");
  const auto listed = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/image_folder.py", folder.path()});
  if (listed.status == kNoPackage) GTEST_SKIP() << "build/python has no package torchvision";
  ASSERT_EQ(listed.status, 0) << listed.output;
  const auto images = vision::read_image_folder(folder.path());
  std::string ours;
  for (int64_t i = 0; i < images.size(); i++) {
    const auto label = images.labels[static_cast<size_t>(i)];
    ours += fmt::format("{}\t{}\t{}\n", label, images.classes[static_cast<size_t>(label)], images.places[static_cast<size_t>(i)].name);
  }
  EXPECT_EQ(ours, listed.output);
}

TEST(ImageFolder, ReadsPicturesByNumber) {
  const Folder folder;
  make_files(folder, {"b/1.jpg", "b/in/2.PNG", "a/a rather long name.webp"});
  const auto images = vision::read_image_folder(folder.path());
  EXPECT_THAT(images.classes, ElementsAre("a", "b"));
  EXPECT_THAT(images.labels, ElementsAre(0, 1, 1));
  std::string buffer;
  EXPECT_EQ(images.read(0, buffer), "a/a rather long name.webp");
  EXPECT_EQ(images.read(1, buffer), "b/1.jpg");
  EXPECT_EQ(images.read(2, buffer), "b/in/2.PNG");
  EXPECT_EQ(images.name(2), (folder / "b/in/2.PNG").string());
  for (const int64_t number : {-1, 3}) {
    EXPECT_THAT(message_of<UsageError>([&] { images.read(number, buffer); }), HasSubstr("the set has 3; the sampler's size must be"));
  }
  std::filesystem::remove(folder / "b/1.jpg");
  EXPECT_THAT(message_of<IoError>([&] { images.read(1, buffer); }), HasSubstr((folder / "b/1.jpg").string()));
}

TEST(ImageFolder, HasAFingerprintOfWhatItFound) {
  const Folder one, other;
  for (const auto* const folder : {&one, &other}) make_files(*folder, {"a/1.jpg", "a/2.jpg", "b/1.jpg"});
  const auto print = vision::read_image_folder(one.path()).fingerprint();
  EXPECT_EQ(print, vision::read_image_folder(other.path()).fingerprint());
  make_files(other, {"b/2.jpg"});
  EXPECT_NE(print, vision::read_image_folder(other.path()).fingerprint());
}

TEST(ImageFolder, SaysWhatIsWrongWithAFolder) {
  const Folder folder;
  EXPECT_THAT(refusal_of(folder / "missing"), AllOf(HasSubstr("missing: No such file"), HasSubstr(folder.path().string())));
  write_file(folder / "loose.jpg", "");
  EXPECT_THAT(refusal_of(folder / "loose.jpg"), HasSubstr("loose.jpg"));
  EXPECT_THAT(refusal_of(folder.path()), HasSubstr("has no folders; each class has one"));
  make_files(folder, {"a/1.jpg", "b/1.txt", "c/x/README"});
  EXPECT_THAT(refusal_of(folder.path()), HasSubstr("no picture (.jpg, .jpeg, .png, .webp) of the classes 'b', 'c'"));
  make_files(folder, {"b/1.TIFF", "c/1.jpg"});
  EXPECT_THAT(refusal_of(folder.path()), HasSubstr("b/1.TIFF is a picture of a format that is not read"));
  std::filesystem::remove_all(folder / "b");
  EXPECT_EQ(vision::read_image_folder(folder.path()).size(), 2);
  std::filesystem::create_symlink("self", folder / "self");
  EXPECT_THAT(refusal_of(folder.path()), HasSubstr("self: Too many levels of symbolic links"));
  std::filesystem::remove(folder / "self");
  std::filesystem::create_directory_symlink(folder.path(), folder / "a/again");
  EXPECT_THAT(refusal_of(folder.path()), HasSubstr("is too deep; does a link in it lead back?"));
}

}  // namespace
}  // namespace tessera::testing::image_folder_test
