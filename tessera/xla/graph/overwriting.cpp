#include "tessera/xla/graph/overwriting.h"

#include <algorithm>
#include <span>
#include <string_view>

namespace tessera::xla {
namespace {

constexpr size_t kMost = 200;  // the most nodes that reads() visits; for a value that depends on more nodes, it returns true

bool is_one_of(std::string_view name, std::span<const std::string_view> names) { return std::ranges::find(names, name) != names.end(); }

/// Whether compilers compute the operation before the operations that read its result, and fuse it with none of these.
bool stands_alone(const Node& node) {
  static constexpr std::string_view kNames[] = {"all_gather", "all_reduce", "cholesky", "convolution", "custom_call", "dot_general", "fft",
                                                "optimization_barrier", "reduce_scatter", "rng_bit_generator", "scatter", "sort", "triangular_solve", "while"};
  return is_one_of(node.name, kNames);
}

/// Whether each element of the result depends only on the elements at the same place of the operands.
bool is_elementwise(const Node& node) {
  static constexpr std::string_view kMoves[] = {"dynamic_slice", "dynamic_update_slice", "gather", "reduce_window", "reverse", "transpose"};
  const auto fits = [&](const Value& operand) { return operand.rank() == 0 || operand.sizes() == node.results[0].sizes; };
  return !is_one_of(node.name, kMoves) && std::ranges::all_of(node.operands, fits);
}

}  // namespace

/// Whether `value` is computed from the array by the same operations as `own`. Compares few nodes, because few lie between `own` and the
/// array.
bool Overwriting::is_same(const Value& value, const Value& own) const {
  if (value == own) return true;
  const auto &one = value.node(), &other = own.node();
  return own != array_ && one.kind == Node::Kind::Operation && other.kind == one.kind && value.result() == own.result() &&
         one.name == std::string_view(other.name) && one.attributes == other.attributes && one.results == other.results &&
         std::ranges::equal(one.operands, other.operands, [&](const Value& a, const Value& b) { return is_same(a, b); });
}

bool Overwriting::reads(const Value& value, bool moved) {
  if (value == array_) return true;
  const auto& node = value.node();
  if (node.kind != Node::Kind::Operation || node.id < array_.node().id || stands_alone(node)) return false;
  if (!moved && is_same(value, own_)) return false;
  if (!seen_.emplace(&node, moved).second) return false;
  if (seen_.size() > kMost) return true;
  moved = moved || !is_elementwise(node);
  return std::ranges::any_of(node.operands, [&](const Value& operand) { return reads(operand, moved); });
}

}  // namespace tessera::xla
