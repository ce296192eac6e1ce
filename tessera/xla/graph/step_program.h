// Makes one program that computes given values: orders its operations, and makes its key, text and arguments.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// A value to compute, and the buffers whose memory it may take over.
struct Wanted {
  Value value;
  std::shared_ptr<const Data> donor = nullptr;
};

/// Whether an argument keeps its memory, or a result takes it.
enum class Memory { Kept, Taken };

/// A step before it runs. Steps with the same key and numbers share a program, which each runs with its own arguments. Steps with the same
/// key whose numbers differ can share a program, too, after move() has made the numbers that differ arguments.
class StepProgram {
 public:
  explicit StepProgram(std::vector<Wanted> wanted);

  /// Everything that decides the program's text except numbers(). This is the full data and not a hash, so steps that differ in more than
  /// numbers never have the same key.
  const std::string& key() const { return key_; }
  /// The numbers in the text: constants, and offsets of slices.
  const std::vector<int64_t>& numbers() const { return numbers_; }
  /// Turns each marked number into an argument, together with all other numbers of the same operation.
  void move(const std::vector<bool>& marked);
  pjrt::Program program() const;
  /// Returns a list of arguments for each replica.
  std::vector<std::vector<pjrt::Buffer>> arguments(const pjrt::Client& client, int replicas) const;
  /// Returns the arguments whose memory a result takes, or the arguments that keep their memory.
  std::vector<std::shared_ptr<const Data>> arguments_of(Memory memory) const;
  std::vector<Type> results() const;
  size_t operations() const { return operations_.size(); }

 private:
  struct Number {
    const Node* node;
    size_t which;  // its index among the numbers of an operation
  };
  struct Scalars {
    at::ScalarType element;
    std::vector<Number> all;
  };
  void place(Node& leaf);
  Scalars& scalars_of(at::ScalarType element);
  void choose_donors();
  void write_key();

  std::vector<Wanted> wanted_;
  std::vector<Node*> operations_, data_;
  std::vector<int64_t> numbers_;
  Scalars scalars_[3] = {{at::kFloat, {}}, {at::kDouble, {}}, {at::kLong, {}}};
  std::vector<int> result_in_;  // for each argument in data_: the index of the result that takes its memory, or -1
  std::string key_;
};

}  // namespace tessera::xla
