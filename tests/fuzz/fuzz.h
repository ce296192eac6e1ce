// The interface between fuzz targets and their driver, libFuzzer or driver.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tessera::fuzz {

/// Each file defines one. All of them are one program, which is the target by whose name it is called: tests/fuzz_hub is "hub".
struct Target {
  /// `read` is given what strangers may hand to us; `seeds` are inputs to begin with: valid ones, and those that have done harm.
  Target(const std::string& name, void (*read)(std::span<const uint8_t> data), std::vector<std::string> (*seeds)());

  void (*read)(std::span<const uint8_t> data);
  std::vector<std::string> (*seeds)();
};

/// Ends the process if the program at this path is none of them.
const Target& target_called(const std::string& program);

/// Runs a reader. Ends the process if the reader throws anything but an Error of ours, or one that shows libtorch's calls.
void expect_own_errors(const std::function<void()>& read);

/// A folder for this process, in memory where that is possible.
const std::string& folder();
void write_file(const std::string& path, std::span<const uint8_t> bytes);

}  // namespace tessera::fuzz
