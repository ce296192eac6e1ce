// Runs what replaces the operator of a weight, see shard/weight_operator.h. For paging.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <string_view>

namespace tessera {

/// The result of what replaces the operator, if something does. `weight`: its weight, or a view that note_transposed has seen.
std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments);
/// `view` is weight.t().
void note_transposed(const at::Tensor& weight, const at::Tensor& view);
/// Whether something replaces operators of a weight that is not sharded, and has its own values.
bool is_only_replaced(const at::Tensor& weight);
/// The operators of such a weight come to paging with `values`, too, which set_data gives it.
void keep_replaced(const at::Tensor& values);
/// The values of a weight that is held in another form, or of a view that note_transposed has seen. Undefined for any other tensor.
at::Tensor decoded(const at::Tensor& weight);
/// Whether operators of this thread run as they are.
bool& runs_plainly();

}  // namespace tessera
