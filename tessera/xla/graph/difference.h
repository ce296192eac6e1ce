// Finds why a step needed another program: the first difference from the step's earlier programs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::xla {

struct Difference {
  size_t line = 0;    // how many compared lines are equal before the difference; all of them if only arguments differ
  std::string where;  // names place and kind of the difference, so that each is reported once
  std::string text;   // the place, and what each of the two programs has there
};
/// Compares two texts of StepProgram, which must differ.
Difference first_difference(std::string_view now, std::string_view before);

/// Remembers the programs that each step has had. Two programs belong to one step if they have as many arguments and the same types of
/// results (parameters, states and all else that outlives the step). So the first batch of an evaluation is a step of its own: the running
/// sum is not an argument yet.
class StepHistory {
 public:
  /// Adds a new program by its number. If the step has three or more programs and keeps needing new ones, returns how this program differs
  /// from the most similar earlier one, but only once for each place and kind of difference.
  std::optional<std::string> add(size_t program, const std::string& text);
  /// Adds a new program that replaces `other`: the new program takes as an argument a number that is a constant in `other`.
  void replace(size_t program, size_t other, const std::string& text);
  /// Counts a run of a program that was added before.
  void ran(size_t program);

 private:
  struct Step {
    std::map<size_t, std::string> texts;  // StableHLO of the newest programs, by program number
    int64_t programs = 0, runs = 0;
  };
  std::map<std::string, Step> steps_;
  std::map<size_t, Step*> of_program_;
  std::set<std::string> told_;
};

}  // namespace tessera::xla
