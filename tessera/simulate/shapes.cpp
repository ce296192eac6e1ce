#include "tessera/simulate/shapes.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

#include <unordered_map>

namespace tessera::simulate {
namespace {

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

template <size_t... operands>
Results like(Operands in) {
  return {alike(in[operands])...};
}

/// The gradients of the operands at these places, where the mask asks for them.
template <size_t mask, size_t... operands>
Results gradients_of(Operands in) {
  const auto wanted = in[mask].toBoolList();
  Results results;
  for (const auto operand : {operands...}) results.emplace_back(wanted.get(results.size()) ? alike(in[operand]) : at::Tensor());
  return results;
}

/// Statistics of a norm are in float32, unless the values are in float64.
at::Tensor statistics(const at::Tensor& x, at::IntArrayRef sizes) {
  return without_values(sizes, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

Results layer_norm(Operands in) {
  const auto& x = in[0].toTensor();
  auto sizes = x.sizes().vec();
  std::fill_n(sizes.rbegin(), in[1].toDimVector().size(), 1);
  return {alike(x), statistics(x, sizes), statistics(x, sizes)};
}

Results group_norm(Operands in) {
  const auto& x = in[0].toTensor();
  const std::vector<int64_t> sizes = {x.size(0), in[6].toInt()};
  return {alike(x), statistics(x, sizes), statistics(x, sizes)};
}

Results batch_norm(Operands in) {
  const auto& x = in[0].toTensor();
  const bool is_training = in[5].toBool();
  const auto channels = is_training ? x.size(1) : 0;
  return {alike(x), statistics(x, channels), statistics(x, channels)};
}

Results batch_norm_backward(Operands in) {
  const auto mask = in[9].toBoolList();
  const auto& x = in[1].toTensor();
  const auto sums = [&](size_t i) { return mask.get(i) ? statistics(x, x.size(1)) : at::Tensor(); };
  return {mask.get(0) ? alike(x) : at::Tensor(), sums(1), sums(2)};
}

/// The kernel has heads behind tokens in memory.
Results attention(Operands in) {
  const auto& queries = in[0].toTensor();
  const auto batch = queries.size(0), heads = queries.size(1), length = queries.size(2), size = in[2].toTensor().size(3);
  return {without_values({batch, length, heads, size}, queries.scalar_type()).transpose(1, 2),
          statistics(queries, {batch, length, heads}).transpose(1, 2)};
}

Results rows_of_weight(Operands in) {
  const auto& grad = in[0].toTensor();
  return {without_values({in[2].toInt(), grad.size(-1)}, grad.scalar_type())};
}

Results chosen_rows(Operands in) {
  const auto& from = in[0].toTensor();
  if (from.dim() == 0) return {alike(from)};
  auto sizes = from.sizes().vec();
  sizes[static_cast<size_t>(at::maybe_wrap_dim(in[1].toInt(), from.dim()))] = in[2].toTensor().numel();
  return {without_values(sizes, from.scalar_type())};
}

Results convolved(Operands in) {
  const auto &x = in[0].toTensor(), &weight = in[1].toTensor();
  const bool has_channels_last = x.suggest_memory_format() == at::MemoryFormat::ChannelsLast && x.dim() == 4;
  return {at::detail::empty_cpu(convolved_sizes(x, weight, in.slice(3)), x.scalar_type(), {}, {}, {},
                                has_channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous)};
}

Results convolved_backward(Operands in) {
  auto results = gradients_of<10, 1, 2>(in);
  const bool has_bias = in[10].toBoolList().get(2);
  results.emplace_back(has_bias ? without_values(in[3].toIntVector(), in[0].toTensor().scalar_type()) : at::Tensor());
  return results;
}

Results with_dropout(Operands in) {
  const auto& x = in[0].toTensor();
  return {alike(x), without_values(x.sizes(), at::kBool)};
}

/// A pooling whose result has these sizes in the last dimensions.
Results pooled(Operands in) {
  const auto& x = in[0].toTensor();
  auto sizes = x.sizes().vec();
  const auto last = in[1].toIntVector();
  std::ranges::copy(last, sizes.end() - std::ssize(last));
  return {without_values(sizes, x.scalar_type())};
}

Results chosen_values(Operands in) {
  const auto &x = in[1].toTensor(), &y = in[2].toTensor();
  const auto sizes = at::infer_size(in[0].toTensor().sizes(), at::infer_size(x.sizes(), y.sizes()));
  return {without_values(sizes, at::result_type(x, y))};
}

const std::unordered_map<std::string_view, ShapeRule>& rules() {
  static const std::unordered_map<std::string_view, ShapeRule> all = {
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", gradients_of<7, 1, 5, 6>},
      {"aten::native_group_norm", group_norm},
      {"aten::native_group_norm_backward", gradients_of<9, 1, 4, 4>},
      {"aten::native_batch_norm", batch_norm},
      {"aten::native_batch_norm_backward", batch_norm_backward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", like<1, 2, 3>},
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

std::vector<int64_t> convolved_sizes(const at::Tensor& x, const at::Tensor& weight, Operands options) {
  const auto stride = options[0].toIntVector(), padding = options[1].toIntVector(), dilation = options[2].toIntVector(),
             output_padding = options[4].toIntVector();
  const bool is_transposed = options[3].toBool();
  const auto at = [](const std::vector<int64_t>& values, int64_t i) { return values[values.size() == 1 ? 0 : static_cast<size_t>(i)]; };
  std::vector<int64_t> sizes = {x.size(0), is_transposed ? weight.size(1) * options[5].toInt() : weight.size(0)};
  for (int64_t i = 0; i < x.dim() - 2; i++) {
    const auto size = x.size(i + 2), kernel = at(dilation, i) * (weight.size(i + 2) - 1);
    sizes.push_back(is_transposed ? (size - 1) * at(stride, i) - 2 * at(padding, i) + kernel + at(output_padding, i) + 1
                                  : (size + 2 * at(padding, i) - kernel - 1) / at(stride, i) + 1);
  }
  return sizes;
}

}  // namespace tessera::simulate
