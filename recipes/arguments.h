// Command lines as people write them.
#pragma once

#include <string>
#include <vector>

/// The arguments in the order that CLI11 takes them, last first. Flags may have underscores for dashes: --batch_size.
inline std::vector<std::string> with_dashes(int argc, char** argv) {
  std::vector<std::string> result;
  for (int i = argc - 1; i > 0; i--) {
    std::string argument = argv[i];
    if (argument.starts_with("--")) {
      for (size_t at = 0; at < argument.size() && argument[at] != '='; at++) {
        if (argument[at] == '_') argument[at] = '-';
      }
    }
    result.push_back(std::move(argument));
  }
  return result;
}
