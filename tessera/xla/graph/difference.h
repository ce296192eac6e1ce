// Why a step needed another program: what differs first from those that it had.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::xla {

struct Difference {
  size_t line = 0;    // of the text, up to which both programs are equal
  std::string where;  // one for all programs that differ in the same place in the same way
  std::string text;   // says what it is now and what it was
};
/// Of two texts of StepProgram, which must differ.
Difference first_difference(std::string_view now, std::string_view before);

/// The programs that each step has had. A step is known by the types of its results: its parameters, states and what else outlives it.
class StepHistory {
 public:
  /// What differs from the most similar program before: from a step's third program on, and once for each place.
  std::optional<std::string> add(const std::string& text);

 private:
  std::map<std::string, std::vector<std::string>> texts_;
  std::set<std::string> told_;
};

}  // namespace tessera::xla
