// Why a step needed another program: what differs first from those that it had.
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
  std::string where;  // one for all programs that differ in the same place in the same way
  std::string text;   // says what it is now and what it was
};
/// Of two texts of StepProgram, which must differ.
Difference first_difference(std::string_view now, std::string_view before);

/// The programs that each step has had. A step is known by the types of its results, which are its parameters, states and what else
/// outlives it, and by how many arguments it has: the first batch of an evaluation has no sum yet.
class StepHistory {
 public:
  /// A new program, by its number. Tells what differs from the most similar one before, once for each place, if the step has three or more
  /// of them and needs others again and again.
  std::optional<std::string> add(size_t program, const std::string& text);
  /// A new program in place of another, of which it has a number as an argument.
  void replace(size_t program, size_t other, const std::string& text);
  /// A program that was there.
  void ran(size_t program);

 private:
  struct Step {
    std::map<size_t, std::string> texts;  // of the last programs
    int64_t programs = 0, runs = 0;
  };
  std::map<std::string, Step> steps_;
  std::map<size_t, Step*> of_program_;
  std::set<std::string> told_;
};

}  // namespace tessera::xla
