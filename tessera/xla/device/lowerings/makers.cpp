// Operators that make tensors from numbers, such as arange, and operators that only move elements, such as roll.
#include <cmath>

#include "tessera/xla/device/dimensions.h"

namespace tessera::xla {
namespace {

/// The values start + i * step. If the type is not integral, `start` and `step` are arguments of the program.
Value progression(const at::Tensor& out, int64_t count, const at::Scalar& start, const at::Scalar& step) {
  if (c10::isIntegralType(out.scalar_type(), false)) {
    const auto places = hlo::iota({at::kLong, {count}}, 0);
    return convert(places * step.toLong() + start.toLong(), out.scalar_type());
  }
  const auto places = hlo::iota({out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, {count}}, 0);
  return convert(places * like(places, step.toDouble()) + like(places, start.toDouble()), out.scalar_type());
}

template <class Number>
void check_progression(Number start, Number end, Number step) {
  TORCH_CHECK(step > 0 || step < 0, "step must be nonzero");
  TORCH_CHECK(std::isfinite(static_cast<double>(start)) && std::isfinite(static_cast<double>(end)), "unsupported range: ", start, " -> ",
              end);
  TORCH_CHECK(step > 0 ? end >= start : end <= start, "upper bound and lower bound inconsistent with step sign");
}

/// Throws for the same numbers as libtorch, which first converts them to the type of the result.
void check_progression(const at::Tensor& out, const at::Scalar& start, const at::Scalar& end, const at::Scalar& step) {
  if (c10::isIntegralType(out.scalar_type(), false)) return check_progression(start.toLong(), end.toLong(), step.toLong());
  check_progression(start.toDouble(), end.toDouble(), step.toDouble());
}

void arange(Call& call) {
  const auto& out = *call.out();
  const auto start = call[0].toScalar(), end = call[1].toScalar(), step = call[2].toScalar();
  check_progression(out, start, end, step);
  // Computes the count as libtorch does: in doubles, except for long results, whose large numbers doubles would round.
  const auto count = out.scalar_type() == at::kLong
                         ? (end.toLong() - start.toLong() + step.toLong() + (step.toLong() > 0 ? -1 : 1)) / step.toLong()
                         : static_cast<int64_t>(std::ceil((end.toDouble() - start.toDouble()) / step.toDouble()));
  call.give(progression(out, count, start, step));
}

void range(Call& call) {
  const auto start = call[0].toScalar(), end = call[1].toScalar(), step = call[2].toScalar();
  check_progression(*call.out(), start, end, step);
  call.give(progression(*call.out(), static_cast<int64_t>((end.toDouble() - start.toDouble()) / step.toDouble()) + 1, start, step));
}

/// The values of linspace. As in libtorch, the first half is computed from the start, and the second half from the end.
Value even_steps(const Call& call) {
  const auto type = call.result_type();
  if (!c10::isFloatingType(type)) throw NotLowered();  // for integers libtorch rounds the step
  const double start = call.number(0), end = call.number(1);
  const auto count = call.integer(2);
  TORCH_CHECK(count >= 0, "number of steps must be non-negative");
  const auto places = hlo::iota({hlo::wide(type), {count}}, 0);
  const auto from = like(places, start), to = like(places, end);
  if (count == 1) return from;
  const auto step = like(places, (end - start) / static_cast<double>(count - 1));
  const auto left = count - 1 - places;
  const auto is_early = places < count / 2;
  return select(is_early, from + step * places, to - step * left);
}

void linspace(Call& call) {
  call.give_rounded(even_steps(call));
}

void logspace(Call& call) {
  const auto steps = even_steps(call);
  call.give_rounded(binary("power", like(steps, call.number(3)), steps));
}

void eye(Call& call) {
  const auto rows = call.integer(0), columns = call.integer(call.arguments() - 1);
  TORCH_CHECK(rows >= 0 && columns >= 0, "eye: numbers of rows and columns must not be negative, got ", rows, " and ", columns);
  const Type places{at::kLong, {rows, columns}};
  call.give_rounded(compare("EQ", hlo::iota(places, 0), hlo::iota(places, 1)));
}

Lowering triangle(const char* direction) {
  return [direction](Call& call) {
    const auto x = call.value(0);
    const Type places{at::kLong, x.sizes()};
    const auto row = hlo::iota(places, x.rank() - 2), column = hlo::iota(places, x.rank() - 1);
    const auto kept = compare(direction, column, row + call.integer(1));
    call.give(select(kept, x, 0));
  };
}

/// Makes a list of the row and the column of each place on one side of a diagonal.
Lowering triangle_places(bool (*is_inside)(int64_t above)) {
  return [is_inside](Call& call) {
    TORCH_CHECK(call.integer(0) >= 0 && call.integer(1) >= 0, "numbers of rows and columns must not be negative, got ", call.integer(0),
                " and ", call.integer(1));
    Sizes rows, columns;
    for (int64_t i = 0; i < call.integer(0); i++) {
      for (int64_t k = 0; k < call.integer(1); k++) {
        if (!is_inside(k - i - call.integer(2))) continue;
        rows.push_back(i);
        columns.push_back(k);
      }
    }
    const auto count = static_cast<int64_t>(rows.size());
    rows.insert(rows.end(), columns.begin(), columns.end());
    const auto type = call.has(3) ? call[3].toScalarType() : at::kLong;
    call.give(reshape(hlo::constants(rows, type), {2, count}));
  };
}

void flip(Call& call) {
  const auto x = call.value(0);
  const auto dimensions = wrapped(call.integers(1), x.rank());
  call.give(x.rank() ? reverse(x, dimensions) : x);
}

Value rolled(const Value& x, int64_t d, int64_t by) {
  const auto size = x.size(d);
  if (size == 0) return x;
  const auto first = (size - by % size) % size;
  if (first == 0) return x;
  const Value parts[] = {slice(x, d, first, size), slice(x, d, 0, first)};
  return concatenate(parts, d);
}

void roll(Call& call) {
  auto x = call.value(0);
  const auto by = call.integers(1), dimensions = call.integers(2);
  TORCH_CHECK(!by.empty(), "roll: `shifts` required");
  TORCH_CHECK(by.size() == dimensions.size() || (by.size() == 1 && dimensions.empty()), "roll: shifts and dimensions must align, got ",
              by.size(), " and ", dimensions.size());
  if (dimensions.empty()) return call.give(reshape(rolled(flat(x), 0, by[0]), x.sizes()));
  for (size_t i = 0; i < by.size(); i++) x = rolled(x, wrapped(dimensions[i], x.rank()), by[i]);
  call.give(x);
}

void channel_shuffle(Call& call) {
  const auto x = call.value(0);
  const auto groups = call.integer(1);
  TORCH_CHECK(x.rank() > 2, "channel_shuffle: expected more than 2 dimensions, got ", x.rank());
  TORCH_CHECK(groups > 0 && x.size(1) % groups == 0, "channel_shuffle: ", x.size(1), " channels can't be divided into ", groups, " groups");
  Sizes split{x.size(0), groups, x.size(1) / groups, -1};
  split[3] = c10::multiply_integers(x.sizes().begin() + 2, x.sizes().end());
  call.give(reshape(transpose(reshape(x, split), {0, 2, 1, 3}), x.sizes()));
}

}  // namespace

void register_makers() {
  add_kernels({
      {"arange.start_out", arange},
      {"range.out", range},
      {"linspace.out", linspace},
      {"logspace.out", logspace},
      {"eye.out eye.m_out", eye},
      {"tril", triangle("LE")},
      {"triu", triangle("GE")},
      {"tril_indices", triangle_places([](int64_t above) { return above <= 0; })},
      {"triu_indices", triangle_places([](int64_t above) { return above >= 0; })},
      {"flip", flip},
      {"roll", roll},
      {"channel_shuffle", channel_shuffle},
  });
}

}  // namespace tessera::xla
