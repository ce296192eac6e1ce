// Finds the numbers of a step that change from run to run.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::xla {

/// Marks the numbers that differ among steps with the same StepProgram::key(). Unmarked numbers stay constants in the program's text,
/// because compilers optimize constants best.
class MovingNumbers {
 public:
  /// Compares a step's numbers with those of the first step, and marks those that differ. Returns whether it has marked any number now: the
  /// program compiled so far has that number as a constant.
  bool note(const std::vector<int64_t>& numbers) {
    if (first_.empty()) first_ = numbers;
    marked_.resize(first_.size());
    bool is_new = false;
    for (size_t i = 0; i < numbers.size(); i++) {
      if (numbers[i] == first_[i] || marked_[i]) continue;
      marked_[i] = is_new = true;
    }
    return is_new;
  }
  const std::vector<bool>& marked() const { return marked_; }

 private:
  std::vector<int64_t> first_;
  std::vector<bool> marked_;
};

}  // namespace tessera::xla
