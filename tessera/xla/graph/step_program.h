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

/// What has to be known before a program is run. Two steps with the same key have the same program, and each their own arguments.
class StepProgram {
 public:
  explicit StepProgram(std::vector<Wanted> wanted);

  /// All that decides the program's text, exactly.
  const std::string& key() const { return key_; }
  pjrt::Program program() const;
  /// For each replica.
  std::vector<std::vector<pjrt::Buffer>> arguments(const pjrt::Client& client, int replicas) const;
  /// Those whose memory results take, or the others.
  std::vector<std::shared_ptr<const Data>> arguments_of(Memory memory) const;
  std::vector<Type> results() const;
  size_t operations() const { return operations_.size(); }

 private:
  void place(Node& leaf);
  void choose_donors();
  void write_key();

  std::vector<Wanted> wanted_;
  std::vector<Node*> operations_, data_;
  struct Scalars {
    at::ScalarType element;
    std::vector<Node*> nodes;
  };
  Scalars scalars_[2] = {{at::kFloat, {}}, {at::kDouble, {}}};
  std::vector<int> result_in_;  // for each argument in data_: the result that takes its memory, or -1
  std::string key_;
};

}  // namespace tessera::xla
