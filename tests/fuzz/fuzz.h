// What a fuzz target and its driver share. A target defines LLVMFuzzerTestOneInput, so libFuzzer can drive it as well as driver.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace tessera::fuzz {

/// Inputs to begin with: valid ones, and those that have done harm.
std::vector<std::string> seeds();

/// Runs a reader. Ends the process if the reader throws anything but an Error of ours, or one that shows libtorch's calls.
void expect_own_errors(const std::function<void()>& read);

/// A folder for this process, in memory where that is possible.
const std::string& folder();
void write_file(const std::string& path, std::span<const uint8_t> bytes);

}  // namespace tessera::fuzz
