// The cells of LSTM and GRU: except on the CPU, libtorch runs each step of these layers as one operator.
#include "tessera/xla/device/dimensions.h"

namespace tessera::xla {
namespace {

Value hyperbolic_tangent(const Value& x) {
  return unary("tanh", x);
}

/// Splits a value into equal parts along the second dimension.
std::vector<Value> parts_of(const Value& x, int64_t count) {
  const auto width = x.size(1) / count;
  std::vector<Value> parts;
  for (int64_t i = 0; i < count; i++) parts.push_back(slice(x, 1, i * width, (i + 1) * width));
  return parts;
}
Value concatenated(std::span<const Value> parts) {
  return concatenate(parts, 1);
}

/// Argument `gates`, plus its bias if there is one, in `count` parts.
std::vector<Value> gates_of(const Call& call, size_t gates, size_t bias, int64_t count) {
  auto all = call.wide_value(gates);
  if (call.has(bias)) all = all + expand(call.value(bias, all.element()), all.sizes());
  return parts_of(all, count);
}

void lstm_cell(Call& call) {
  const auto given = gates_of(call, 0, 3, 4), hidden = gates_of(call, 1, 4, 4);
  const auto gate = [&](size_t i) { return given[i] + hidden[i]; };
  const auto in = logistic(gate(0)), forget = logistic(gate(1)), cell = hyperbolic_tangent(gate(2)), out = logistic(gate(3));
  const auto c = forget * call.wide_value(2) + in * cell;
  call.give_as(call.result_type(), {out * hyperbolic_tangent(c), c, concatenated(std::vector{in, forget, cell, out})});
}

void lstm_cell_gradient(Call& call) {
  const auto type = call.tensor(2).scalar_type();
  const auto value = [&](size_t i) { return call.value(i, hlo::wide(type)); };
  const auto before = value(2), tanh = hyperbolic_tangent(value(3));
  const auto gates = parts_of(value(4), 4);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto g = call.has(0) ? value(0) : fixed(tanh, 0);
  auto gc = g * out * tangent_slope(tanh);
  if (call.has(1)) gc = gc + value(1);
  const auto all = concatenated(std::vector{gc * cell * logistic_slope(in), gc * before * logistic_slope(forget),
                                            gc * in * tangent_slope(cell), g * tanh * logistic_slope(out)});
  call.give_as(type, {all, gc * forget, call.flag(5) ? hlo::sum(all, {0}) : Value()});
}

void gru_cell(Call& call) {
  const auto given = gates_of(call, 0, 3, 3), hidden = gates_of(call, 1, 4, 3);
  const auto before = call.wide_value(2);
  const auto reset = logistic(given[0] + hidden[0]), update = logistic(given[1] + hidden[1]);
  const auto fresh = hyperbolic_tangent(given[2] + reset * hidden[2]);
  call.give_as(call.result_type(), {fresh + update * (before - fresh), concatenated(std::vector{reset, update, fresh, before, hidden[2]})});
}

void gru_cell_gradient(Call& call) {
  const auto g = call.wide_value(0);
  const auto saved = parts_of(call.wide_value(1), 5);
  const auto &reset = saved[0], &update = saved[1], &fresh = saved[2], &before = saved[3], &hidden = saved[4];
  const auto of_fresh = g * (1 - update) * tangent_slope(fresh);
  const auto of_update = g * (before - fresh) * logistic_slope(update);
  const auto of_reset = of_fresh * hidden * logistic_slope(reset);
  const auto to_given = concatenated(std::vector{of_reset, of_update, of_fresh}),
             to_hidden = concatenated(std::vector{of_reset, of_update, of_fresh * reset});
  const bool has_bias = call.flag(2);
  const auto sum = [&](const Value& all) { return has_bias ? hlo::sum(all, {0}) : Value(); };
  call.give_as(call.result_type(), {to_given, to_hidden, g * update, sum(to_given), sum(to_hidden)});
}

}  // namespace

void register_recurrent() {
  add_kernels({
      {"_thnn_fused_lstm_cell", lstm_cell},
      {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_gradient},
      {"_thnn_fused_gru_cell", gru_cell},
      {"_thnn_fused_gru_cell_backward", gru_cell_gradient},
  });
}

}  // namespace tessera::xla
