#include "tessera/xla/graph/collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::xla::hlo {
namespace {

std::string text_of(const ReplicaGroups& groups) {
  std::string rows;
  for (const auto& group : groups) rows += fmt::format("{}[{}]", rows.empty() ? "" : ", ", fmt::join(group, ", "));
  return fmt::format("replica_groups = dense<[{}]> : tensor<{}x{}xi64>", rows, groups.size(), groups.front().size());
}

Value collective(const char* name, const Value& x, std::string attributes, Sizes sizes, Combine combine = Combine::None) {
  c10::SmallVector<Type, 1> results{Type{x.element(), std::move(sizes)}};
  return Value(c10::make_intrusive<Node>(name, std::move(attributes), c10::SmallVector<Value, 3>{x}, std::move(results), combine));
}

int64_t size_of(const ReplicaGroups& groups) { return static_cast<int64_t>(groups.front().size()); }

}  // namespace

Value all_gather(const Value& list, const ReplicaGroups& groups) {
  return collective("all_gather", list, "all_gather_dim = 0 : i64, " + text_of(groups), {list.sizes()[0] * size_of(groups)});
}

Value all_reduce(const Value& x, Combine combine, const ReplicaGroups& groups) {
  return collective("all_reduce", x, text_of(groups), x.sizes(), combine);
}

Value reduce_scatter(const Value& list, Combine combine, const ReplicaGroups& groups) {
  return collective("reduce_scatter", list, text_of(groups) + ", scatter_dimension = 0 : i64", {list.sizes()[0] / size_of(groups)}, combine);
}

Value replica_number() {
  return Value(c10::make_intrusive<Node>("replica_id", std::string(), c10::SmallVector<Value, 3>{}, c10::SmallVector<Type, 1>{Type{at::kUInt32, {}}}));
}

}  // namespace tessera::xla::hlo
