#include <fmt/format.h>
#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "fuzz.h"
#include "tessera/base/error.h"

namespace tessera::fuzz {

void expect_own_errors(const std::function<void()>& read) {
  std::string words;
  try {
    return read();
  } catch (const Error& error) {
    words = error.what();
    if (words.find("Exception raised from") == std::string::npos) return;
  } catch (const std::exception& error) {
    words = error.what();
  }
  fmt::print(stderr, "not an error of ours: {}\n", words);
  std::abort();
}

const std::string& folder() {
  struct Folder {
    std::string path;
    Folder() {
      for (const auto* const parent : {"/dev/shm", "/tmp"}) {
        path = std::string(parent) + "/tessera-fuzz-XXXXXX";
        if (::mkdtemp(path.data()) != nullptr) return;
      }
      std::abort();
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static const Folder own;
  return own.path;
}

void write_file(const std::string& path, std::span<const uint8_t> bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace tessera::fuzz
