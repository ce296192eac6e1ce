// What is known of values that come from shards: whose they are, and which operators would take them for a whole parameter's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <string>

#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/paging/operators.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

using Stack = torch::jit::Stack;

template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  }
}

/// "'layers.3.weight' of unit 'layers.3'"
std::string name_of(const Unit::Parameter& parameter, const Unit& unit);

/// Of a shard, its gradient, or what was computed from them; nothing of other tensors.
OriginPtr origin_of(const at::Tensor& tensor, const StorageTag* tag);

/// What is computed from shards, place by place, is no more whole than they are: operators on it come to paging, too.
void mark_results(const Stack& stack, size_t base, const OriginPtr& origin);

/// Of an operator with operands of that origin, whose arguments begin at `base`: throws UsageError where its result would pass for that of the
/// whole parameter.
void expect_no_mixing(const OperatorFacts& op, bool by_parts, const Origin& origin);
/// Says that a value lies elsewhere in a shard than in the whole parameter.
[[noreturn]] void refuse_places(const OperatorFacts& op, const Origin& origin);
/// And where a view leaves out values: a value lies elsewhere in a shard than in the whole parameter.
void expect_all_values(const OperatorFacts& op, const at::Tensor& viewed, const Stack& views, size_t base, const Origin& origin);
/// And where an elementwise operator would meet values at other places, or leave its results in a tensor that does not know them.
void expect_same_places(const OperatorFacts& op, const Stack& stack, size_t base, const Origin& origin);

}  // namespace tessera
