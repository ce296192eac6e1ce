// Why a step needed another program: the first difference from its earlier programs.
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
  std::string text;   // says what it is now and what it was
};
/// Compares two texts of StepProgram, which must differ.
Difference first_difference(std::string_view now, std::string_view before);

/// The programs that each step has had. A step is known by the types of its results (parameters, states and all else that outlives it) and
/// by its number of arguments: the first batch of an evaluation has no sum yet.
class StepHistory {
 public:
  /// Adds a new program by its number. Returns how it differs from the most similar earlier one, once for each place, if the step has three
  /// or more programs and keeps needing new ones.
  std::optional<std::string> add(size_t program, const std::string& text);
  /// Adds a new program in place of `other`: it takes as an argument a number that the text of `other` has.
  void replace(size_t program, size_t other, const std::string& text);
  /// Counts a run of a program that was added before.
  void ran(size_t program);

 private:
  struct Step {
    std::map<size_t, std::string> texts;  // of the newest programs
    int64_t programs = 0, runs = 0;
  };
  std::map<std::string, Step> steps_;
  std::map<size_t, Step*> of_program_;
  std::set<std::string> told_;
};

}  // namespace tessera::xla
