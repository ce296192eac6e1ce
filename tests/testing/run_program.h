// Runs another program to its end.
#pragma once

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/process.h"

namespace tessera::testing {

constexpr int kNoPackage = 3;  // the exit status of scripts whose Python lacks a package

struct Ended {
  int status;          // -1 if it did not end in a minute
  std::string output;  // what it wrote to standard output
};

/// An empty program name means that the build has found no Python interpreter.
inline Ended run_program(const std::vector<std::string>& command, const std::map<std::string, std::string>& environment = {}) {
  if (command.front().empty()) return {.status = kNoPackage, .output = "there is no such Python here"};
  Process process(command, environment, Process::Output::Capture);
  auto output = process.read_output();
  return {.status = process.wait(std::chrono::seconds(60)).value_or(-1), .output = std::move(output)};
}

}  // namespace tessera::testing
