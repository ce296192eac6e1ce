// From values to one program that computes them: its order, its key, its text, its arguments.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// A value that shall be computed, and the leaf whose memory it may take.
struct Wanted {
  Value value;
  std::shared_ptr<const Data> donor = nullptr;
};

/// What becomes of an argument's memory.
enum class Memory { Kept, Taken };

/// What has to be known before a program is run. Two steps with the same key and the same numbers have the same program, and each their own
/// arguments. Where the numbers differ, they can be arguments, too.
class StepProgram {
 public:
  explicit StepProgram(std::vector<Wanted> wanted);

  /// All that decides the program's text but for its numbers, exactly.
  const std::string& key() const { return key_; }
  /// What the text has of numbers: constants, and where slices begin.
  const std::vector<int64_t>& numbers() const { return numbers_; }
  /// Makes arguments of those that are marked, and of all that stand in the same operation.
  void move(const std::vector<bool>& marked);
  pjrt::Program program() const;
  /// For each replica.
  std::vector<std::vector<pjrt::Buffer>> arguments(const pjrt::Client& client, int replicas) const;
  /// Those whose memory results take, or the others.
  std::vector<std::shared_ptr<const Data>> arguments_of(Memory memory) const;
  std::vector<Type> results() const;
  size_t operations() const { return operations_.size(); }

 private:
  struct Number {
    const Node* node;
    size_t which;  // of the node's numbers
  };
  struct Scalars {
    at::ScalarType element;
    char letter;
    std::vector<Number> all;
  };
  void place(Node& leaf);
  Scalars& scalars_of(at::ScalarType element);
  void choose_donors();
  void write_key();

  std::vector<Wanted> wanted_;
  std::vector<Node*> operations_, data_;
  std::vector<int64_t> numbers_;
  Scalars scalars_[3] = {{at::kFloat, 's', {}}, {at::kDouble, 'd', {}}, {at::kLong, 'n', {}}};
  std::vector<int> result_in_;  // for each argument in data_: the result that takes its memory, or -1
  std::string key_;
};

}  // namespace tessera::xla
