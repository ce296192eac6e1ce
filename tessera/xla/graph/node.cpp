#include "tessera/xla/graph/node.h"

#include <atomic>

#include "tessera/base/error.h"

namespace tessera::xla {
namespace {

std::atomic<uint64_t> made = 0;
std::atomic<int64_t> living_operations = 0;

}  // namespace

Node::Node(const char* name, std::string attributes, c10::SmallVector<Value, 3> operands, c10::SmallVector<Type, 1> results,
           Combine combine, c10::SmallVector<int64_t, 1> numbers)
    : kind(Kind::Operation),
      combine(combine),
      id(++made),
      name(name),
      attributes(std::move(attributes)),
      operands(std::move(operands)),
      results(std::move(results)),
      numbers(std::move(numbers)) {
  living_operations++;
}

Node::Node(std::shared_ptr<const Data> data, Type type)
    : kind(Kind::Data), id(++made), name("data"), results{std::move(type)}, data(std::move(data)) {}

Node::Node(double number, at::ScalarType element) : kind(Kind::Scalar), id(++made), name("scalar"), results{Type{element, {}}}, number(number) {}

int64_t Node::operations() { return living_operations; }

Node::~Node() {
  if (kind == Kind::Operation) living_operations--;
  // Releases operands in a loop: a chain of operands may be as long as the program, and nested destructors would overflow the stack.
  std::vector<Value> ending(std::make_move_iterator(operands.begin()), std::make_move_iterator(operands.end()));
  while (!ending.empty()) {
    auto value = std::move(ending.back());
    ending.pop_back();
    if (!value || !c10::raw::intrusive_ptr::use_count(&value.node()) || c10::raw::intrusive_ptr::use_count(&value.node()) > 1) continue;
    for (auto& operand : value.node().operands) ending.push_back(std::move(operand));
  }
}

const std::shared_ptr<const Data>& expect_values(const std::shared_ptr<const Data>& data) {
  if (data->empty()) throw UsageError("a tensor on xla is lost, because the program that should have computed it has failed: compute it anew");
  return data;
}

Value leaf(std::shared_ptr<const Data> data, Type type) { return Value(c10::make_intrusive<Node>(std::move(data), std::move(type))); }

}  // namespace tessera::xla
