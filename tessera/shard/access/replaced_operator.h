// Runs the function that replaces an operator of a weight (shard/weight_operator.h). For paging.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <span>
#include <string_view>

namespace tessera {

/// Returns the result of the function that replaces the operator, if one does. `weight`: its weight, or a view that note_transposed has
/// seen.
std::optional<at::Tensor> replaced_operator(const at::Tensor& weight, std::string_view name, std::span<const c10::IValue> arguments);
/// Marks `view` as weight.t().
void note_transposed(const at::Tensor& weight, const at::Tensor& view);
/// Whether operators of the weight are replaced, but it is neither sharded nor held in another form.
bool is_only_replaced(const at::Tensor& weight);
/// Lets paging see the operators of such a weight also with `values`, which set_data gives it.
void keep_replaced(const at::Tensor& values);
/// The values of a weight that is held in another form, or of a view that note_transposed has seen. Undefined for any other tensor.
at::Tensor decoded(const at::Tensor& weight);
/// Whether operators of this thread are not replaced.
bool& runs_plainly();

}  // namespace tessera
