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
  size_t line = 0;    // of the text, up to which both programs are equal
  std::string where;  // equal for programs that differ in the same place in the same way
  std::string text;   // the place, with its text in the new program and in the earlier one
};
/// Compares two texts of StepProgram, which must differ.
Difference first_difference(std::string_view now, std::string_view before);

/// The programs that each step has had. Programs belong to one step if they have the same types of results (parameters, states and all else
/// that outlives the step) and as many arguments: the first batch of an evaluation is a step of its own, because no running sum exists yet.
class StepHistory {
 public:
  /// Adds a new program by its number. If the step has three or more programs and keeps needing new ones, returns how this one differs from
  /// the most similar earlier one, but reports each place only once.
  std::optional<std::string> add(size_t program, const std::string& text);
  /// Adds a new program in place of `other`: the new one takes as an argument a number that is a constant in the text of `other`.
  void replace(size_t program, size_t other, const std::string& text);
  /// Counts a run of a program that was added before.
  void ran(size_t program);

 private:
  struct Step {
    std::map<size_t, std::string> texts;  // of the newest programs, by number
    int64_t programs = 0, runs = 0;
  };
  std::map<std::string, Step> steps_;
  std::map<size_t, Step*> of_program_;
  std::set<std::string> told_;
};

}  // namespace tessera::xla
