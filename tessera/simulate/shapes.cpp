#include "tessera/simulate/shapes.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

#include <unordered_map>

#include "tessera/simulate/operators.h"

namespace tessera::simulate {
namespace {

using Operands = c10::ArrayRef<c10::IValue>;

at::Tensor without_values(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_cpu(sizes, dtype);
}

/// As large as the tensor, and with its strides if it has no gaps.
at::Tensor alike(const at::Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) return without_values(tensor.sizes(), tensor.scalar_type());
  return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

at::Tensor alike(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? alike(value.toTensor()) : at::Tensor();
}

/// The gradients of the operands at these places, where the mask asks for them.
Results gradients_of(Operands operands, std::initializer_list<size_t> places, const c10::IValue& mask) {
  Results results;
  const auto wanted = mask.toBoolList();
  for (const auto place : places) results.emplace_back(wanted.get(results.size()) ? alike(operands[place]) : at::Tensor());
  return results;
}

/// Statistics of a norm are in float32, unless the values are in float64.
at::ScalarType dtype_of_statistics(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Results layer_norm(Operands operands) {
  const auto& x = operands[0].toTensor();
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < operands[1].toDimVector().size(); i++) sizes[sizes.size() - 1 - i] = 1;
  const auto statistics = [&] { return without_values(sizes, dtype_of_statistics(x)); };
  return {alike(x), statistics(), statistics()};
}

Results group_norm(Operands operands) {
  const auto& x = operands[0].toTensor();
  const auto statistics = [&] { return without_values({x.size(0), operands[6].toInt()}, dtype_of_statistics(x)); };
  return {alike(x), statistics(), statistics()};
}

template <size_t training>
Results batch_norm(Operands operands) {
  const auto& x = operands[0].toTensor();
  const auto statistics = [&] { return without_values({operands[training].toBool() ? x.size(1) : 0}, dtype_of_statistics(x)); };
  return {alike(x), statistics(), statistics()};
}

Results batch_norm_backward(Operands operands) {
  const auto mask = operands[9].toBoolList();
  const auto channels = operands[1].toTensor().size(1);
  const auto sums = [&](size_t i) {
    return mask.get(i) ? without_values({channels}, dtype_of_statistics(operands[1].toTensor())) : at::Tensor();
  };
  return {mask.get(0) ? alike(operands[1]) : at::Tensor(), sums(1), sums(2)};
}

/// The kernel has heads behind tokens in memory.
Results attention(Operands operands) {
  const auto& queries = operands[0].toTensor();
  const auto batch = queries.size(0), heads = queries.size(1), length = queries.size(2), size = operands[2].toTensor().size(3);
  return {without_values({batch, length, heads, size}, queries.scalar_type()).transpose(1, 2),
          without_values({batch, length, heads}, dtype_of_statistics(queries)).transpose(1, 2)};
}

Results attention_backward(Operands operands) {
  return {alike(operands[1]), alike(operands[2]), alike(operands[3])};
}

Results rows_of_weight(Operands operands) {
  const auto& grad = operands[0].toTensor();
  return {without_values({operands[2].toInt(), grad.size(-1)}, grad.scalar_type())};
}

Results chosen_rows(Operands operands) {
  const auto& from = operands[0].toTensor();
  if (from.dim() == 0) return {alike(from)};
  auto sizes = from.sizes().vec();
  sizes[static_cast<size_t>(at::maybe_wrap_dim(operands[1].toInt(), from.dim()))] = operands[2].toTensor().numel();
  return {without_values(sizes, from.scalar_type())};
}

Results convolved(Operands operands) {
  const auto &x = operands[0].toTensor(), &weight = operands[1].toTensor();
  const auto sizes = convolved_sizes(x, weight, operands[3].toIntVector(), operands[4].toIntVector(), operands[5].toIntVector(),
                                     operands[6].toBool(), operands[7].toIntVector(), operands[8].toInt());
  auto result = without_values(sizes, x.scalar_type());
  if (x.suggest_memory_format() == at::MemoryFormat::ChannelsLast && x.dim() == 4)
    result = at::detail::empty_cpu(sizes, x.scalar_type(), {}, {}, {}, at::MemoryFormat::ChannelsLast);
  return {result};
}

Results convolved_backward(Operands operands) {
  auto results = gradients_of(operands, {1, 2}, operands[10]);
  const bool has_bias = operands[10].toBoolList().get(2);
  results.emplace_back(has_bias ? without_values(operands[3].toIntVector(), operands[0].toTensor().scalar_type()) : at::Tensor());
  return results;
}

Results with_dropout(Operands operands) {
  const auto& x = operands[0].toTensor();
  return {alike(x), without_values(x.sizes(), at::kBool)};
}

/// A pooling whose result has these sizes in the last dimensions.
Results pooled(Operands operands) {
  const auto& x = operands[0].toTensor();
  auto sizes = x.sizes().vec();
  const auto last = operands[1].toIntVector();
  std::ranges::copy(last, sizes.end() - static_cast<std::ptrdiff_t>(last.size()));
  return {without_values(sizes, x.scalar_type())};
}

template <size_t operand>
Results like(Operands operands) {
  return {alike(operands[operand])};
}

Results chosen_values(Operands operands) {
  const auto &x = operands[1].toTensor(), &y = operands[2].toTensor();
  const auto sizes = at::infer_size(operands[0].toTensor().sizes(), at::infer_size(x.sizes(), y.sizes()));
  return {without_values(sizes, at::result_type(x, y))};
}

const std::unordered_map<std::string_view, ShapeRule>& rules() {
  static const std::unordered_map<std::string_view, ShapeRule> all = {
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", [](Operands operands) { return gradients_of(operands, {1, 5, 6}, operands[7]); }},
      {"aten::native_group_norm", group_norm},
      {"aten::native_group_norm_backward",
       [](Operands operands) { return gradients_of(operands, {1, 4, 4}, operands[9]); }},
      {"aten::native_batch_norm", batch_norm<5>},
      {"aten::native_batch_norm_backward", batch_norm_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward},
      {"aten::embedding_dense_backward", rows_of_weight},
      {"aten::index_select", chosen_rows},
      {"aten::convolution", convolved},
      {"aten::convolution_backward", convolved_backward},
      {"aten::native_dropout", with_dropout},
      {"aten::_adaptive_avg_pool2d", pooled},
      {"aten::_adaptive_avg_pool2d_backward", like<1>},
      {"aten::relu", like<0>},
      {"aten::flip", like<0>},
      {"aten::roll", like<0>},
      {"aten::where", chosen_values},
  };
  return all;
}

}  // namespace

ShapeRule shape_rule(std::string_view name) {
  const auto found = rules().find(name);
  return found == rules().end() ? nullptr : found->second;
}

std::vector<int64_t> convolved_sizes(const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
                                     at::IntArrayRef dilation, bool is_transposed, at::IntArrayRef output_padding, int64_t groups) {
  const auto at = [](at::IntArrayRef values, size_t i) { return values[values.size() == 1 ? 0 : i]; };
  std::vector<int64_t> sizes = {x.size(0), is_transposed ? weight.size(1) * groups : weight.size(0)};
  for (int64_t dim = 2; dim < x.dim(); dim++) {
    const auto i = static_cast<size_t>(dim - 2);
    const auto kernel = at(dilation, i) * (weight.size(dim) - 1);
    sizes.push_back(is_transposed ? (x.size(dim) - 1) * at(stride, i) - 2 * at(padding, i) + kernel + at(output_padding, i) + 1
                                  : (x.size(dim) + 2 * at(padding, i) - kernel - 1) / at(stride, i) + 1);
  }
  return sizes;
}

}  // namespace tessera::simulate
