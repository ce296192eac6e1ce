#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>

#include "fuzz.h"
#include "tessera/base/error.h"

namespace tessera::fuzz {
namespace {

std::map<std::string, const Target*>& targets() {
  static std::map<std::string, const Target*> all;
  return all;
}

const Target* chosen = nullptr;  // by libFuzzer's program

}  // namespace

Target::Target(const std::string& name, void (*read)(std::span<const uint8_t> data), std::vector<std::string> (*seeds)())
    : read(read), seeds(seeds) {
  targets().emplace(name, this);
}

const Target& target_called(const std::string& program) {
  const auto name = std::filesystem::path(program).filename().string();
  const auto found = targets().find(name.substr(std::min(name.size(), std::string_view("fuzz_").size())));
  if (found != targets().end()) return *found->second;
  fmt::print(stderr, "{} is called by the name of a target, such as fuzz_{}\n", name, targets().begin()->first);
  std::exit(2);
}

}  // namespace tessera::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tessera::fuzz::chosen->read({data, size});
  return 0;
}

/// Called by libFuzzer before it begins: hands it the seeds in a folder.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  using namespace tessera;
  fuzz::chosen = &fuzz::target_called((*argv)[0]);
  static const auto corpus = fuzz::folder() + "/corpus";
  std::filesystem::create_directories(corpus);
  const auto seeds = fuzz::chosen->seeds();
  for (size_t i = 0; i < seeds.size(); i++) {
    fuzz::write_file(fmt::format("{}/{}", corpus, i), {reinterpret_cast<const uint8_t*>(seeds[i].data()), seeds[i].size()});
  }
  static std::vector<char*> arguments(*argv, *argv + *argc);
  arguments.push_back(const_cast<char*>(corpus.c_str()));
  *argc = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  *argv = arguments.data();
  return 0;
}

namespace tessera::fuzz {

void expect_own_errors(const std::function<void()>& read) {
  std::string words;
  try {
    return read();
  } catch (const Error& error) {
    words = error.what();
    // libtorch lists its calls in many lines. Names in a file could hold some, and libFuzzer finds every word that is searched for.
    constexpr auto kMostLines = 10;
    if (std::ranges::count(words, '\n') < kMostLines) return;
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
