// The interface between fuzz targets and their driver, libFuzzer or driver.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tessera::fuzz {

/// Each file defines one target. One program has them all, and is the target by whose name it is called: tests/fuzz_hub is "hub".
struct Target {
  /// `read` gets bytes as strangers may send them; `seeds` are inputs to begin with: valid ones, and those that have done harm.
  Target(const std::string& name, void (*read)(std::span<const uint8_t> data), std::vector<std::string> (*seeds)());

  void (*read)(std::span<const uint8_t> data);
  std::vector<std::string> (*seeds)();
};

/// Returns the target by whose name a program is called. Ends the process if there is none.
const Target& target_called(const std::string& program);

/// Runs a reader. Ends the process if it throws anything but an Error of ours, or an error that lists libtorch's calls.
void expect_own_errors(const std::function<void()>& read);

/// A folder for this process, in memory where that is possible.
const std::string& folder();
void write_file(const std::string& path, std::span<const uint8_t> bytes);

}  // namespace tessera::fuzz
