// The graph that tracing builds: nodes are StableHLO operations, and leaves become arguments of the program.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/xla/pjrt/client.h"

namespace tessera::xla {

using Type = pjrt::ArrayType;
using Sizes = std::vector<int64_t>;

/// The values of a leaf: one buffer for each replica, or no buffers if the program that should have computed them has failed.
using Data = std::vector<pjrt::Buffer>;

class Node;

namespace hlo {

/// One of a node's results. Copies are the same value.
class Value {
 public:
  Value() = default;
  explicit Value(c10::intrusive_ptr<Node> node, uint32_t result = 0) : node_(std::move(node)), result_(result) {}

  explicit operator bool() const { return node_.defined(); }
  bool operator==(const Value& other) const { return node_ == other.node_ && result_ == other.result_; }

  Node& node() const { return *node_; }
  uint32_t result() const { return result_; }
  const Type& type() const;
  const Sizes& sizes() const { return type().sizes; }
  at::ScalarType element() const { return type().element; }
  int64_t rank() const { return static_cast<int64_t>(sizes().size()); }
  int64_t size(int64_t dimension) const { return sizes()[static_cast<size_t>(dimension)]; }

 private:
  c10::intrusive_ptr<Node> node_;
  uint32_t result_ = 0;
};

}  // namespace hlo

using hlo::Value;

/// The function by which an operation such as a reduction or a scatter combines two elements.
enum class Combine : uint8_t { None, Add, Multiply, Max, Min, And, Or, Second };

class Node : public c10::intrusive_ptr_target {
 public:
  enum class Kind : uint8_t { Operation, Data, Scalar };

  /// Makes an operation. `name` must be a literal, because nodes keep the pointer. `numbers` are attributes that may differ in the next
  /// step, and then become arguments of the program. If there are `numbers`, `attributes` must follow from them and from the types, because
  /// StepProgram::key() then leaves `attributes` out.
  Node(const char* name, std::string attributes, c10::SmallVector<Value, 3> operands, c10::SmallVector<Type, 1> results,
       Combine combine = Combine::None, c10::SmallVector<int64_t, 1> numbers = {});
  Node(std::shared_ptr<const Data> data, Type type);
  /// Makes a number that the program takes as an argument.
  Node(double number, at::ScalarType element);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  ~Node() override;

  /// Returns how many operation nodes exist in this process. The number grows until a program has computed their results.
  static int64_t operations();

  const Kind kind;
  const Combine combine = Combine::None;
  const uint64_t id;  // grows with time, so sorting by it puts each node after its operands
  const char* const name;
  const std::string attributes;
  c10::SmallVector<Value, 3> operands;
  const c10::SmallVector<Type, 1> results;
  const c10::SmallVector<int64_t, 1> numbers;  // floating-point numbers as the bits of doubles
  const std::shared_ptr<const Data> data;
  const double number = 0;

  // Scratch space of the StepProgram that is being made.
  uint64_t visited = 0;
  int32_t place = -1;
  int32_t first_argument = -1;  // the place of the first of `numbers` among the arguments; -1 if they are constants
};

inline const Type& hlo::Value::type() const {
  return node_->results[result_];
}

/// Returns `data`. Throws UsageError if its values are lost because their program has failed.
const std::shared_ptr<const Data>& expect_values(const std::shared_ptr<const Data>& data);

Value leaf(std::shared_ptr<const Data> data, Type type);

}  // namespace tessera::xla
