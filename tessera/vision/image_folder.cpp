#include "tessera/vision/image_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"

namespace tessera::vision {
namespace {

constexpr int kDeepestFolder = 32;
constexpr std::array kOfTorchvision = {".bmp", ".pgm", ".ppm", ".tif", ".tiff"};  // torchvision reads these, this library does not

/// Pictures by folder. Folders are texts, not paths, because Python sorts them so: "a-b" comes before "a/b".
using PicturesOfFolders = std::map<std::string, std::vector<std::string>>;

/// Returns the folders in a folder and links to folders, by the listing itself if it has types: to ask for each picture would take long.
std::set<std::string> folders_in(const std::filesystem::path& folder) {
  std::set<std::string> folders;
  if (object_path(folder)) {
    std::ranges::copy_if(names_in(folder).value_or(std::vector<std::string>()), std::inserter(folders, folders.end()),
                         [&](const auto& name) { return is_folder(folder / name); });
    return folders;
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error); !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    if (entry->is_directory(error)) folders.insert(entry->path().filename().string());
    if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) error.clear();  // a link to nowhere
    if (error) throw IoError("can't look at {}: {}", entry->path(), error.message());
  }
  if (error) throw IoError("can't read the folder {}: {}", folder, error.message());
  return folders;
}

void find_pictures(const std::filesystem::path& root, const std::string& folder, int depth, PicturesOfFolders& found) {
  if (depth > kDeepestFolder) throw IoError("the folder {} is too deep; does a link in it lead back?", root / folder);
  auto& pictures = found[folder];
  const auto folders = folders_in(root / folder);
  for (auto& name : names_in(root / folder).value_or(std::vector<std::string>())) {
    if (folders.contains(name)) {
      find_pictures(root, folder + '/' + name, depth + 1, found);
    } else if (is_picture_name(name)) {
      pictures.push_back(std::move(name));
    } else if (std::ranges::any_of(kOfTorchvision, [&](const char* ending) { return lower(name).ends_with(ending); })) {
      throw IoError("{} is a picture of a format that is not read; make it a PNG, or put it elsewhere", root / folder / name);
    }
  }
}

}  // namespace

ImageSet read_image_folder(const std::filesystem::path& folder) {
  if (!names_in(folder)) throw IoError("can't read the folder {}: {}", folder, why_not_opened(folder, ENOENT));
  const auto classes = folders_in(folder);
  ImageSet images{.classes = {classes.begin(), classes.end()}, .roots = {folder}};
  if (images.classes.empty()) throw IoError("{} has no folders; each class has one of its own, with the class's pictures in it", folder);
  std::vector<std::string> empty;
  for (size_t label = 0; label < images.classes.size(); label++) {
    PicturesOfFolders found;
    find_pictures(folder, images.classes[label], 0, found);
    const auto before = images.size();
    for (const auto& [below, pictures] : found) {
      for (const auto& name : pictures) {
        images.places.push_back({.name = below + '/' + name});
        images.labels.push_back(static_cast<int64_t>(label));
      }
    }
    if (images.size() == before) empty.push_back(images.classes[label]);
  }
  if (!empty.empty()) {
    throw IoError("in {} there is no picture (.jpg, .jpeg, .png, .webp) of {} {}; each folder there is a class", folder,
                  empty.size() == 1 ? "the class" : "the classes", printable(some_of(empty)));
  }
  return images;
}

}  // namespace tessera::vision
