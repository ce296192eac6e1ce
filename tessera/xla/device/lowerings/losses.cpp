// Losses and their gradients.
#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/elements.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using hlo::both;
using hlo::fixed;
using hlo::is_above;
using hlo::is_below;
using hlo::minus;
using hlo::over;
using hlo::plus;
using hlo::select;
using hlo::times;

enum : int64_t { kNone, kMean, kSum };

Value reduced(const Value& each, int64_t reduction) {
  const auto all = all_dimensions(each.rank());
  return reduction == kNone ? each : reduction == kMean ? mean_of(each, all) : hlo::sum(each, all);
}

/// A loss of pairs of elements. `reduction` is the place of the argument that says how they are reduced.
template <class Each>
Kernel loss(const char* name, size_t reduction, Each each) {
  return {name, [=](Call& call) {
            const auto type = type_of_operands(call);
            call.give(hlo::convert(reduced(each(Elements(call, hlo::wide(type))), call.integer(reduction)), type));
          }};
}

/// `slope` is the derivative of the loss by its input; the arguments begin with the gradient of the loss.
template <class Slope>
Kernel loss_gradient(const char* name, size_t reduction, Slope slope) {
  return {name, [=](Call& call) {
            const auto type = call.result_type();
            const Elements e(call, hlo::wide(type));
            auto gradient = times(e[0], slope(e));
            if (call.integer(reduction) == kMean)
              gradient = over(gradient, fixed(gradient, static_cast<double>(c10::multiply_integers(e.sizes()))));
            call.give(hlo::convert(gradient, type));
          }};
}

Value squared(const Value& x) {
  return times(x, x);
}

Value smooth(const Elements& e) {
  const auto size = hlo::magnitude(minus(e[0], e[1])), beta = e.number(3), half = fixed(size, 0.5);
  return select(is_below(size, beta), over(times(half, squared(size)), beta), minus(size, times(half, beta)));
}
Value smooth_slope(const Elements& e) {
  const auto difference = minus(e[1], e[2]), beta = e.number(4);
  return select(is_below(hlo::magnitude(difference), beta), over(difference, beta), hlo::unary("sign", difference));
}

Value huber(const Elements& e) {
  const auto size = hlo::magnitude(minus(e[0], e[1])), delta = e.number(3), half = fixed(size, 0.5);
  return select(is_above(size, delta), times(delta, minus(size, times(half, delta))), times(half, squared(size)));
}
Value huber_slope(const Elements& e) {
  const auto difference = minus(e[1], e[2]), delta = e.number(4);
  return hlo::smallest(hlo::largest(difference, hlo::negated(delta)), delta);
}

Value weighted(const Elements& e, size_t weight, const Value& value) {
  return e.call().has(weight) ? times(e[weight], value) : value;
}

Value cross_entropy(const Elements& e) {
  const auto x = e[0], target = e[1], low = fixed(x, -100), one = fixed(x, 1);
  const auto yes = hlo::largest(hlo::logarithm(x), low), no = hlo::largest(hlo::log_plus_one(hlo::negated(x)), low);
  return weighted(e, 2, minus(times(minus(target, one), no), times(target, yes)));
}
Value cross_entropy_slope(const Elements& e) {
  const auto x = e[1], variance = hlo::largest(times(x, minus(fixed(x, 1), x)), fixed(x, 1e-12));
  return weighted(e, 3, over(minus(x, e[2]), variance));
}

// --- of classes, which lie along the second dimension, or along the only one ---

struct Classes {
  int64_t dimension;
  Sizes others;
};
Classes classes_of(const Value& x) {
  const int64_t dimension = x.rank() > 1 ? 1 : 0;
  return {dimension, all_but(x.rank(), dimension)};
}

/// The target class of each row, unless it is ignored, and the weights of classes.
struct Targets {
  Value chosen, weights;  // of the shape of x
};
Targets targets_of(const Call& call, const Value& x, const Value& target, size_t weight, int64_t ignored) {
  const auto classes = classes_of(x);
  const auto valid = hlo::compare("NE", target, fixed(target, ignored));
  const auto equal =
      hlo::compare("EQ", hlo::iota({target.element(), x.sizes()}, classes.dimension), hlo::broadcast(target, x.sizes(), classes.others));
  const auto chosen = both(equal, hlo::broadcast(valid, x.sizes(), classes.others));
  return {chosen, call.has(weight) ? hlo::broadcast(call.value(weight, x.element()), x.sizes(), Sizes{classes.dimension}) : fixed(x, 1)};
}

void nll_loss(Call& call) {
  const auto type = call.result_type();
  const auto x = call.wide_value(0), zero = fixed(x, 0);
  const auto reduction = call.integer(3);
  const auto [chosen, weights] = targets_of(call, x, call.value(1), 2, call.integer(4));
  const auto each = hlo::negated(hlo::sum(select(chosen, times(weights, x), zero), {classes_of(x).dimension}));
  const auto total = hlo::sum(select(chosen, weights, zero), all_dimensions(x.rank()));
  if (reduction == kNone) return call.give(std::vector{hlo::convert(each, type), hlo::convert(fixed(total, 0), type)});
  const auto sum = hlo::sum(each, all_dimensions(each.rank()));
  call.give(std::vector{hlo::convert(reduction == kMean ? over(sum, total) : sum, type), hlo::convert(total, type)});
}

void nll_loss_gradient(Call& call) {
  const auto x = call.wide_value(1);
  const auto reduction = call.integer(4);
  const auto [chosen, weights] = targets_of(call, x, call.value(2), 3, call.integer(5));
  auto g = call.wide_value(0);
  if (reduction == kMean) g = over(g, call.wide_value(6));
  const auto rows = hlo::broadcast(g, x.sizes(), reduction == kNone ? classes_of(x).others : Sizes{});
  call.give(hlo::convert(select(chosen, hlo::negated(times(rows, weights)), fixed(x, 0)), call.result_type()));
}

// --- margins: rows of classes, where a single row may lack its dimension ---

Value as_rows(const Value& x) {
  return x.rank() > 1 ? x : hlo::reshape(x, {1, c10::multiply_integers(x.sizes())});
}

/// How far other classes come too near to the right one, and which is the right one.
struct Margins {
  Value x, excess, chosen, weight;
  bool squares;
};
Margins margins_of(const Call& call, size_t first) {
  Margins m;
  m.x = as_rows(call.wide_value(first));
  m.squares = call.number(first + 2) == 2;
  const auto target = hlo::reshape(call.value(first + 1), {m.x.sizes()[0]}), rows = hlo::broadcast(target, m.x.sizes(), Sizes{0});
  m.chosen = hlo::compare("EQ", hlo::iota({target.element(), m.x.sizes()}, 1), rows);
  const auto zero = fixed(m.x, 0), right = spread(hlo::sum(select(m.chosen, m.x, zero), {1}), m.x, {1});
  m.excess = select(m.chosen, zero, hlo::largest(plus(minus(m.x, right), hlo::full(call.number(first + 3), m.x.type())), zero));
  m.weight = over(fixed(m.x, 1), fixed(m.x, static_cast<double>(m.x.sizes()[1])));
  if (!call.has(first + 4)) return m;
  const auto all = hlo::broadcast(call.wide_value(first + 4), m.x.sizes(), Sizes{1});
  m.weight = times(m.weight, spread(hlo::sum(select(m.chosen, all, zero), {1}), m.x, {1}));
  return m;
}

void multi_margin_loss(Call& call) {
  const auto m = margins_of(call, 0);
  const auto each = hlo::sum(times(m.weight, m.squares ? squared(m.excess) : m.excess), {1});
  const auto reduction = call.integer(5);
  call.give(hlo::convert(
      hlo::reshape(reduced(each, reduction), reduction == kNone ? c10::IntArrayRef(call.tensor(1).sizes()) : c10::IntArrayRef{}),
      call.result_type()));
}

/// The gradient of the loss for each row.
Value row_gradients(const Call& call, const Value& x, int64_t reduction) {
  auto g = call.wide_value(0);
  if (reduction == kMean) g = over(g, fixed(g, static_cast<double>(x.sizes()[0])));
  return g.rank() == 0 ? hlo::broadcast(g, x.sizes(), {}) : hlo::broadcast(g, x.sizes(), Sizes{0});
}

void multi_margin_loss_gradient(Call& call) {
  const auto m = margins_of(call, 1);
  const auto zero = fixed(m.x, 0),
             slope = m.squares ? times(fixed(m.x, 2), m.excess) : select(is_above(m.excess, zero), fixed(m.x, 1), zero);
  const auto others = times(times(m.weight, slope), row_gradients(call, m.x, call.integer(6)));
  const auto gradient = select(m.chosen, hlo::negated(spread(hlo::sum(others, {1}), m.x, {1})), others);
  call.give(hlo::convert(hlo::reshape(gradient, call.tensor(1).sizes()), call.result_type()));
}

/// For each row: which class each place of the target names, up to the first -1.
Value named_classes(const Value& x, const Value& target) {
  const Sizes pairs{x.sizes()[0], x.sizes()[1], x.sizes()[1]};
  const Type places{at::kLong, pairs};
  const auto names = hlo::broadcast(target, pairs, Sizes{0, 1});
  // A place counts where no earlier one ends the list.
  const auto ends =
      both(hlo::is_negative(hlo::broadcast(target, pairs, Sizes{0, 2})), hlo::compare("LE", hlo::iota(places, 2), hlo::iota(places, 1)));
  const auto over_already = hlo::reduce(ends, Combine::Or, hlo::constant(int64_t{0}, at::kBool), {2});
  return both(hlo::compare("EQ", names, hlo::iota(places, 2)), hlo::opposite(hlo::broadcast(over_already, pairs, Sizes{0, 1})));
}

/// How far each class that is not named comes too near to each that is: of the shape row, place of the target, class.
struct PairMargins {
  Value named, is_target, excess;
};
PairMargins pair_margins(const Value& x, const Value& target) {
  PairMargins m;
  m.named = named_classes(x, target);
  m.is_target = hlo::reduce(m.named, Combine::Or, hlo::constant(int64_t{0}, at::kBool), {1});
  const auto& pairs = m.named.sizes();
  const auto all = hlo::broadcast(x, pairs, Sizes{0, 2}), zero = fixed(all, 0);
  const auto right = hlo::broadcast(hlo::sum(select(m.named, all, zero), {2}), pairs, Sizes{0, 1});
  const auto counts = both(hlo::broadcast(hlo::reduce(m.named, Combine::Or, hlo::constant(int64_t{0}, at::kBool), {2}), pairs, Sizes{0, 1}),
                           hlo::opposite(hlo::broadcast(m.is_target, pairs, Sizes{0, 2})));
  m.excess = select(counts, hlo::largest(plus(fixed(all, 1), minus(all, right)), zero), zero);
  return m;
}

void multilabel_margin_loss(Call& call) {
  const auto type = call.result_type();
  const auto x = as_rows(call.wide_value(0)), target = as_rows(call.value(1));
  const auto m = pair_margins(x, target);
  const auto sum = hlo::sum(m.excess, {1, 2}), each = over(sum, fixed(sum, static_cast<double>(x.sizes()[1])));
  const auto reduction = call.integer(2);
  const bool rows = call.tensor(0).dim() > 1 && reduction == kNone;
  const auto result = hlo::reshape(reduced(each, reduction), rows ? c10::IntArrayRef(each.sizes()) : c10::IntArrayRef{});
  call.give(std::vector{hlo::convert(result, type), hlo::reshape(hlo::convert(m.is_target, type), call.tensor(1).sizes())});
}

void multilabel_margin_loss_gradient(Call& call) {
  const auto x = as_rows(call.wide_value(1)), target = as_rows(call.value(2));
  const auto m = pair_margins(x, target);
  const auto near = hlo::convert(is_above(m.excess, fixed(m.excess, 0)), x.element());
  const auto to_others = hlo::sum(near, {1}), of_places = hlo::broadcast(hlo::sum(near, {2}), near.sizes(), Sizes{0, 1});
  const auto to_named = hlo::sum(select(m.named, of_places, fixed(near, 0)), {1});
  const auto slope = over(minus(to_others, to_named), fixed(x, static_cast<double>(x.sizes()[1])));
  call.give(hlo::convert(hlo::reshape(times(slope, row_gradients(call, x, call.integer(3))), call.tensor(1).sizes()), call.result_type()));
}

}  // namespace

void register_losses() {
  const Kernel kernels[] = {
      loss("mse_loss", 2, [](const Elements& e) { return squared(minus(e[0], e[1])); }),
      loss_gradient("mse_loss_backward", 3, [](const Elements& e) { return times(fixed(e[1], 2), minus(e[1], e[2])); }),
      loss("smooth_l1_loss", 2, smooth),
      loss_gradient("smooth_l1_loss_backward", 3, smooth_slope),
      loss("huber_loss", 2, huber),
      loss_gradient("huber_loss_backward", 3, huber_slope),
      loss("binary_cross_entropy", 3, cross_entropy),
      loss_gradient("binary_cross_entropy_backward", 4, cross_entropy_slope),
      {"nll_loss_forward", nll_loss},
      {"nll_loss_backward", nll_loss_gradient},
      {"nll_loss2d_forward", nll_loss},
      {"nll_loss2d_backward", nll_loss_gradient},
      {"multi_margin_loss", multi_margin_loss},
      {"multi_margin_loss_backward", multi_margin_loss_gradient},
      {"multilabel_margin_loss_forward", multilabel_margin_loss},
      {"multilabel_margin_loss_backward", multilabel_margin_loss_gradient},
  };
  add_kernels(kernels);
}

}  // namespace tessera::xla
