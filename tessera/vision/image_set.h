// ImageSet: pictures by number, each of a class.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::vision {

/// read_image_folder() and read_tar_shards() make it. It knows where the pictures lie, and has none of their bytes.
struct ImageSet {
  /// A file below a folder, or a part of an archive, where no file begins at byte 0.
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
  /// A text that differs for other pictures, for LoaderOptions::data. Wherever they are moved to, it stays.
  std::string fingerprint() const;
};

/// Whether a file is a picture by the end of its name: .jpg, .jpeg, .png or .webp, in small letters or capitals.
bool is_picture_name(std::string_view name);

}  // namespace tessera::vision
