// Programs for XLA's compilers, and compiled programs.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/xla/memory_figures.h"

namespace tessera::pjrt {

struct ArrayType {
  at::ScalarType element = at::kFloat;
  std::vector<int64_t> sizes;

  bool operator==(const ArrayType&) const = default;
  int64_t bytes() const;
};
/// Returns StableHLO's text of a type, such as "tensor<2x3xf32>".
std::string text_of(const ArrayType& type);

struct Parameter {
  ArrayType type;
  /// The program may put a result into the argument's memory; nobody may use the argument afterwards.
  bool donated = false;
};

struct Program {
  /// A StableHLO module with one function `main`.
  std::string text;
  std::vector<Parameter> parameters;
};

/// A compiled program. Copies are the same program.
class CompiledProgram {
 public:
  class Impl;  // holds the plugin's object
  explicit CompiledProgram(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  MemoryFigures memory() const;
  /// The compiler's own counts, such as "flops"; empty where a plugin counts nothing.
  std::map<std::string, double> cost() const;
  /// How often each HLO operation ("all-gather", "fusion", ...) occurs in the optimized program.
  std::map<std::string, int> operations() const;
  /// The collectives of the optimized program by kind, such as "all-gather".
  std::map<std::string, Collectives> collectives() const;
  /// The compiled program as bytes, which Client::load() takes if devices and processor are of the same kind.
  std::string serialized() const;
  std::vector<ArrayType> outputs() const;

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace tessera::pjrt
