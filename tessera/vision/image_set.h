// ImageSet: pictures by number, each of a class.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::vision {

/// The places of the pictures, without their bytes. read_image_folder() and read_tar_shards() return it.
struct ImageSet {
  /// A file below a folder, or a part of an archive, in which no member begins at byte 0.
  struct Place {
    std::string name;
    uint32_t root = 0;
    uint64_t offset = 0, size = 0;
  };

  std::vector<std::string> classes = {};  // by label
  std::vector<int64_t> labels = {};       // of each picture
  std::vector<Place> places = {};
  std::vector<std::filesystem::path> roots = {};  // folders or archives

  int64_t size() const { return std::ssize(labels); }
  /// For messages: FOLDER/CLASS/NAME.jpg, ARCHIVE.tar/NAME.jpg.
  std::string name(int64_t number) const;
  /// Reads a picture's file into `buffer`, which only grows, and returns its bytes there. Several threads may do so.
  std::string_view read(int64_t number, std::string& buffer) const;
  /// Returns a text for LoaderOptions::data that differs for other pictures, and stays the same if the files are moved.
  std::string fingerprint() const;
};

/// Returns whether the name is that of a picture, by its end: .jpg, .jpeg, .png or .webp, in small letters or capitals.
bool is_picture_name(std::string_view name);

}  // namespace tessera::vision
