// Which numbers of a step change from run to run.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::xla {

/// Which numbers of all steps with one key have moved. The others stay in the program's text, where compilers make most of them.
class MovingNumbers {
 public:
  /// Returns whether one more number differs from its first value, so that the compiled program does not have it as an argument.
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
