// Losses and their gradients.
#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"

namespace tessera::xla {
namespace {

enum : int64_t { kNone, kMean, kSum };

Value reduced(const Value& each, int64_t reduction) {
  const auto all = all_dimensions(each.rank());
  return reduction == kNone ? each : reduction == kMean ? mean_of(each, all) : hlo::sum(each, all);
}

/// Lowers a loss of pairs of elements. `reduction` is the index of the argument that says how the losses of all pairs are reduced.
template <class Each>
Lowering loss(size_t reduction, Each each) {
  return [=](Call& call) {
    const auto type = type_of_operands(call);
    call.give(convert(reduced(each(Elements(call, hlo::wide(type))), call.integer(reduction)), type));
  };
}

/// Lowers the gradient of such a loss: `slope` is the derivative of the loss with respect to its input, and argument 0 is the gradient of
/// the loss.
template <class Slope>
Lowering loss_gradient(size_t reduction, Slope slope) {
  return [=](Call& call) {
    const auto type = call.result_type();
    const Elements e(call, hlo::wide(type));
    auto gradient = e[0] * slope(e);
    if (call.integer(reduction) == kMean) gradient = gradient / c10::multiply_integers(e.sizes());
    call.give(convert(gradient, type));
  };
}

Value squared(const Value& x) {
  return x * x;
}

Value smooth(const Elements& e) {
  const auto size = magnitude(e[0] - e[1]), beta = e.number(3), half = fixed(size, 0.5);
  return select(size < beta, half * squared(size) / beta, size - half * beta);
}
Value smooth_slope(const Elements& e) {
  const auto difference = e[1] - e[2], beta = e.number(4);
  return select(magnitude(difference) < beta, difference / beta, unary("sign", difference));
}

Value huber(const Elements& e) {
  const auto size = magnitude(e[0] - e[1]), delta = e.number(3), half = fixed(size, 0.5);
  return select(size > delta, delta * (size - half * delta), half * squared(size));
}
Value huber_slope(const Elements& e) {
  const auto difference = e[1] - e[2], delta = e.number(4);
  return smallest(largest(difference, -delta), delta);
}

Value weighted(const Elements& e, size_t weight, const Value& value) {
  return e.call().has(weight) ? e[weight] * value : value;
}

Value cross_entropy(const Elements& e) {
  const auto x = e[0], target = e[1], low = fixed(x, -100), one = fixed(x, 1);
  const auto yes = largest(logarithm(x), low), no = largest(log_plus_one(-x), low);
  return weighted(e, 2, (target - one) * no - target * yes);
}
Value cross_entropy_slope(const Elements& e) {
  const auto x = e[1], variance = largest(x * (1 - x), 1e-12);
  return weighted(e, 3, (x - e[2]) / variance);
}

// --- losses of classes, which lie along the second dimension, or along the only one ---

struct Classes {
  int64_t dimension;
  Sizes others;
};
Classes classes_of(const Value& x) {
  const int64_t dimension = x.rank() > 1 ? 1 : 0;
  return {dimension, all_but(x.rank(), dimension)};
}

/// `chosen` is true at the target class of each row, unless that class is ignored; `weights` has the weight of each element's class.
struct Targets {
  Value chosen, weights;  // of the shape of x
};
Targets targets_of(const Call& call, const Value& x, const Value& target, size_t weight, int64_t ignored) {
  const auto classes = classes_of(x);
  const auto valid = compare("NE", target, ignored);
  const auto equal =
      compare("EQ", hlo::iota({target.element(), x.sizes()}, classes.dimension), broadcast(target, x.sizes(), classes.others));
  const auto chosen = equal & broadcast(valid, x.sizes(), classes.others);
  return {chosen, call.has(weight) ? broadcast(call.value(weight, x.element()), x.sizes(), Sizes{classes.dimension}) : fixed(x, 1)};
}

void nll_loss(Call& call) {
  const auto type = call.result_type();
  const auto x = call.wide_value(0), zero = fixed(x, 0);
  const auto reduction = call.integer(3);
  const auto [chosen, weights] = targets_of(call, x, call.value(1), 2, call.integer(4));
  const auto each = -hlo::sum(select(chosen, weights * x, zero), {classes_of(x).dimension});
  const auto total = hlo::sum(select(chosen, weights, zero), all_dimensions(x.rank()));
  if (reduction == kNone) return call.give({convert(each, type), convert(fixed(total, 0), type)});
  const auto sum = hlo::sum(each, all_dimensions(each.rank()));
  call.give({convert(reduction == kMean ? sum / total : sum, type), convert(total, type)});
}

void nll_loss_gradient(Call& call) {
  const auto x = call.wide_value(1);
  const auto reduction = call.integer(4);
  const auto [chosen, weights] = targets_of(call, x, call.value(2), 3, call.integer(5));
  auto g = call.wide_value(0);
  if (reduction == kMean) g = g / call.wide_value(6);
  const auto rows = broadcast(g, x.sizes(), reduction == kNone ? classes_of(x).others : Sizes{});
  call.give_rounded(select(chosen, -(rows * weights), 0));
}

// --- margin losses: x is {rows, classes}, or {classes} for a single row ---

Value as_rows(const Value& x) {
  return x.rank() > 1 ? x : reshape(x, {1, c10::multiply_integers(x.sizes())});
}

/// The terms of multi_margin_loss, of the shape of x: `excess` is max(0, margin - x[target] + x), and `chosen` is true at the target.
struct Margins {
  Value x, excess, chosen, weight;
  bool squares;
};
Margins margins_of(const Call& call, size_t first) {
  Margins m;
  m.x = as_rows(call.wide_value(first));
  m.squares = call.number(first + 2) == 2;
  const auto target = reshape(call.value(first + 1), {m.x.size(0)}), rows = broadcast(target, m.x.sizes(), Sizes{0});
  m.chosen = compare("EQ", hlo::iota({target.element(), m.x.sizes()}, 1), rows);
  const auto zero = fixed(m.x, 0), right = spread(hlo::sum(select(m.chosen, m.x, zero), {1}), m.x, {1});
  m.excess = select(m.chosen, zero, largest(m.x - right + hlo::full(call.number(first + 3), m.x.type()), zero));
  m.weight = fixed(m.x, 1) / m.x.size(1);
  if (!call.has(first + 4)) return m;
  const auto all = broadcast(call.wide_value(first + 4), m.x.sizes(), Sizes{1});
  m.weight = m.weight * spread(hlo::sum(select(m.chosen, all, zero), {1}), m.x, {1});
  return m;
}

void multi_margin_loss(Call& call) {
  const auto m = margins_of(call, 0);
  const auto each = hlo::sum(m.weight * (m.squares ? squared(m.excess) : m.excess), {1});
  const auto reduction = call.integer(5);
  call.give_rounded(reshape(reduced(each, reduction), reduction == kNone ? c10::IntArrayRef(call.tensor(1).sizes()) : c10::IntArrayRef{}));
}

/// Returns the gradient of each row's loss, in the shape of x.
Value row_gradients(const Call& call, const Value& x, int64_t reduction) {
  auto g = call.wide_value(0);
  if (reduction == kMean) g = g / x.size(0);
  return g.rank() == 0 ? broadcast(g, x.sizes(), {}) : broadcast(g, x.sizes(), Sizes{0});
}

void multi_margin_loss_gradient(Call& call) {
  const auto m = margins_of(call, 1);
  const auto zero = fixed(m.x, 0), slope = m.squares ? 2 * m.excess : select(m.excess > zero, 1, zero);
  const auto others = m.weight * slope * row_gradients(call, m.x, call.integer(6));
  const auto gradient = select(m.chosen, -spread(hlo::sum(others, {1}), m.x, {1}), others);
  call.give_rounded(reshape(gradient, call.tensor(1).sizes()));
}

Value any_along(const Value& truth, int64_t d) {
  return reduce(truth, Combine::Or, hlo::constant(0, at::kBool), {d});
}

/// Returns a one-hot vector over the classes for each place of the target: {row, place, class}. All places from the first -1 on have zeros.
Value named_classes(const Value& x, const Value& target) {
  const Sizes pairs{x.size(0), x.size(1), x.size(1)};
  const Type places{at::kLong, pairs};
  const auto names = broadcast(target, pairs, Sizes{0, 1});
  // A place counts if neither this place nor an earlier one has -1, which ends the list.
  const auto ends = (broadcast(target, pairs, Sizes{0, 2}) < 0) & (hlo::iota(places, 2) <= hlo::iota(places, 1));
  const auto over_already = any_along(ends, 2);
  return compare("EQ", names, hlo::iota(places, 2)) & opposite(broadcast(over_already, pairs, Sizes{0, 1}));
}

/// The terms of multilabel_margin_loss, of the shape {row, place in the target, class}: `excess` is max(0, 1 - x[target] + x[class]).
struct PairMargins {
  Value named, is_target, excess;
};
PairMargins pair_margins(const Value& x, const Value& target) {
  PairMargins m;
  m.named = named_classes(x, target);
  m.is_target = any_along(m.named, 1);
  const auto& pairs = m.named.sizes();
  const auto all = broadcast(x, pairs, Sizes{0, 2}), zero = fixed(all, 0);
  const auto right = broadcast(hlo::sum(select(m.named, all, zero), {2}), pairs, Sizes{0, 1});
  const auto counts = broadcast(any_along(m.named, 2), pairs, Sizes{0, 1}) & opposite(broadcast(m.is_target, pairs, Sizes{0, 2}));
  m.excess = select(counts, largest(1 + (all - right), zero), zero);
  return m;
}

void multilabel_margin_loss(Call& call) {
  const auto type = call.result_type();
  const auto x = as_rows(call.wide_value(0)), target = as_rows(call.value(1));
  const auto m = pair_margins(x, target);
  const auto sum = hlo::sum(m.excess, {1, 2}), each = sum / x.size(1);
  const auto reduction = call.integer(2);
  const bool rows = call.tensor(0).dim() > 1 && reduction == kNone;
  const auto result = reshape(reduced(each, reduction), rows ? c10::IntArrayRef(each.sizes()) : c10::IntArrayRef{});
  call.give({convert(result, type), reshape(convert(m.is_target, type), call.tensor(1).sizes())});
}

void multilabel_margin_loss_gradient(Call& call) {
  const auto x = as_rows(call.wide_value(1)), target = as_rows(call.value(2));
  const auto m = pair_margins(x, target);
  const auto near = convert(m.excess > 0, x.element());
  const auto to_others = hlo::sum(near, {1}), of_places = broadcast(hlo::sum(near, {2}), near.sizes(), Sizes{0, 1});
  const auto to_named = hlo::sum(select(m.named, of_places, 0), {1});
  const auto slope = (to_others - to_named) / x.size(1);
  call.give_rounded(reshape(slope * row_gradients(call, x, call.integer(3)), call.tensor(1).sizes()));
}

}  // namespace

void register_losses() {
  add_kernels({
      {"mse_loss", loss(2, [](const Elements& e) { return squared(e[0] - e[1]); })},
      {"mse_loss_backward", loss_gradient(3, [](const Elements& e) { return 2 * (e[1] - e[2]); })},
      {"smooth_l1_loss", loss(2, smooth)},
      {"smooth_l1_loss_backward", loss_gradient(3, smooth_slope)},
      {"huber_loss", loss(2, huber)},
      {"huber_loss_backward", loss_gradient(3, huber_slope)},
      {"binary_cross_entropy", loss(3, cross_entropy)},
      {"binary_cross_entropy_backward", loss_gradient(4, cross_entropy_slope)},
      {"nll_loss_forward nll_loss2d_forward", nll_loss},
      {"nll_loss_backward nll_loss2d_backward", nll_loss_gradient},
      {"multi_margin_loss", multi_margin_loss},
      {"multi_margin_loss_backward", multi_margin_loss_gradient},
      {"multilabel_margin_loss_forward", multilabel_margin_loss},
      {"multilabel_margin_loss_backward", multilabel_margin_loss_gradient},
  });
}

}  // namespace tessera::xla
