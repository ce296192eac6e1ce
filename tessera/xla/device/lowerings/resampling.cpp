#include "tessera/xla/device/lowerings/resampling.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/xla/device/dimensions.h"

namespace tessera::xla {
namespace {

/// A weight for each place of a dimension, in the shape of `x`.
Value weights_along(const Value& x, int64_t d, const std::vector<double>& weights) {
  return broadcast(hlo::constants(weights, x.element()), x.sizes(), Sizes{d});
}

// --- interpolation ---

/// Maps places of the result to places of the argument. Computes in floats as libtorch does, because other types would round some places to
/// other neighbours.
struct Grid {
  int64_t size, results;
  bool corners_aligned;
  float scale;
  float source(int64_t i) const { return corners_aligned ? scale * static_cast<float>(i) : scale * (static_cast<float>(i) + 0.5F) - 0.5F; }
};

/// `given` is the factor by which the result shall be larger, or 0 if the caller gave none.
Grid grid_of(int64_t size, int64_t results, bool corners_aligned, double given) {
  Grid grid{size, results, corners_aligned, 0};
  if (corners_aligned) {
    if (results > 1) grid.scale = static_cast<float>(size - 1) / static_cast<float>(results - 1);
  } else {
    grid.scale = given > 0 ? static_cast<float>(1 / given) : static_cast<float>(size) / static_cast<float>(results);
  }
  return grid;
}

Taps empty_taps(size_t count, int64_t results) {
  const auto n = static_cast<size_t>(results);
  return {std::vector(count, Sizes(n)), std::vector(count, std::vector<double>(n))};
}

using MakeTaps = Taps (*)(const Grid&);

Taps nearest_by(const Grid& grid, float shift) {
  Taps taps{{Sizes(static_cast<size_t>(grid.results))}, {}};
  for (int64_t i = 0; i < grid.results; i++) {
    const auto place = static_cast<int64_t>(std::floor((static_cast<float>(i) + shift) * grid.scale));
    taps.places[0][static_cast<size_t>(i)] = std::min(place, grid.size - 1);
  }
  return taps;
}
Taps nearest(const Grid& grid) {
  return nearest_by(grid, 0);
}
Taps nearest_exact(const Grid& grid) {
  return nearest_by(grid, 0.5F);
}

Taps linear(const Grid& grid) {
  auto taps = empty_taps(2, grid.results);
  for (size_t i = 0; i < static_cast<size_t>(grid.results); i++) {
    const auto source = std::max(grid.source(static_cast<int64_t>(i)), 0.0F);
    const auto place = std::min(static_cast<int64_t>(source), grid.size - 1);
    const auto rest = std::min(std::max(source - static_cast<float>(place), 0.0F), 1.0F);
    taps.places[0][i] = place;
    taps.places[1][i] = std::min(place + 1, grid.size - 1);
    taps.weights[0][i] = 1 - rest;
    taps.weights[1][i] = rest;
  }
  return taps;
}

/// Keys' cubic kernel.
double cubic_kernel(double x, double a) {
  x = std::abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

Taps cubic(const Grid& grid) {
  auto taps = empty_taps(4, grid.results);
  for (size_t i = 0; i < static_cast<size_t>(grid.results); i++) {
    const auto source = grid.source(static_cast<int64_t>(i));
    const auto place = static_cast<int64_t>(std::floor(source));
    for (size_t k = 0; k < 4; k++) {
      const auto from = place - 1 + static_cast<int64_t>(k);
      taps.places[k][i] = std::clamp<int64_t>(from, 0, grid.size - 1);
      taps.weights[k][i] = cubic_kernel(static_cast<double>(source) - static_cast<double>(from), -0.75);
    }
  }
  return taps;
}

/// Stretches the kernel if the result has fewer places than the argument, so that no place of the argument is left out.
Taps antialiased(const Grid& grid, double reach, double (*kernel)(double)) {
  const auto scale = static_cast<double>(grid.scale), stretch = std::max(scale, 1.0), support = reach * stretch;
  auto taps = empty_taps(static_cast<size_t>(std::ceil(support)) * 2 + 1, grid.results);
  for (size_t i = 0; i < static_cast<size_t>(grid.results); i++) {
    const auto centre = scale * (static_cast<double>(i) + 0.5);
    const auto begin = std::max(static_cast<int64_t>(centre - support + 0.5), int64_t{0});
    const auto end = std::min(static_cast<int64_t>(centre + support + 0.5), grid.size);
    double total = 0;
    for (size_t k = 0; k < taps.places.size(); k++) {
      const auto from = begin + static_cast<int64_t>(k);
      taps.places[k][i] = std::min(from, grid.size - 1);
      if (from < end) total += taps.weights[k][i] = kernel((static_cast<double>(from) - centre + 0.5) / stretch);
    }
    for (auto& weights : taps.weights) weights[i] /= total;
  }
  return taps;
}
Taps linear_antialiased(const Grid& grid) {
  return antialiased(grid, 1, [](double x) { return std::max(0.0, 1 - std::abs(x)); });
}
Taps cubic_antialiased(const Grid& grid) {
  return antialiased(grid, 2, [](double x) { return cubic_kernel(x, -0.5); });
}
Taps lanczos_antialiased(const Grid& grid) {
  return antialiased(grid, 3, [](double x) {
    const auto sinc = [](double y) { return y == 0 ? 1.0 : std::sin(std::numbers::pi * y) / (std::numbers::pi * y); };
    return std::abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0.0;
  });
}

enum class Corners : size_t { Never, MayBeAligned };
enum class Way { Forward, Gradient };

/// Applies a map along one dimension, or its gradient, which has `size` places along that dimension.
Value mapped(Way way, const Value& x, int64_t d, int64_t size, const Taps& taps) {
  return way == Way::Forward ? resampled(x, d, taps) : resampled_gradient(x, d, size, taps);
}

/// Argument 1 has the sizes of the forward result and, for a gradient, argument 2 the sizes of the forward input. The next arguments are
/// align_corners, if the operator has it, and the scales.
Lowering upsampling(Way way, Corners corners, MakeTaps make) {
  return [=](Call& call) {
    auto x = call.wide_value(0);
    if (make != nearest && make != nearest_exact && !c10::isFloatingType(x.element()))
      throw NotLowered();  // libtorch rounds whole numbers in another way
    const bool is_forward = way == Way::Forward, may_be_aligned = corners == Corners::MayBeAligned;
    const auto from_sizes = is_forward ? call.tensor(0).sizes().vec() : call.integers(2), results = call.integers(1);
    const size_t after = is_forward ? 2 : 3;
    for (size_t i = 0; i < results.size(); i++) {
      const auto d = x.rank() - static_cast<int64_t>(results.size() - i), size = from_sizes[static_cast<size_t>(d)];
      const auto scale = after + may_be_aligned + i;
      const double given = call.has(scale) ? call.number(scale) : 0;
      x = mapped(way, x, d, size, make(grid_of(size, results[i], may_be_aligned && call.flag(after), given)));
    }
    call.give_rounded(x);
  };
}

// --- padding that repeats elements of the argument ---

using Source = int64_t (*)(int64_t place, int64_t size);

int64_t mirrored(int64_t place, int64_t size) {
  return place < 0 ? -place : place >= size ? 2 * (size - 1) - place : place;
}
int64_t nearest_inside(int64_t place, int64_t size) {
  return std::clamp<int64_t>(place, 0, size - 1);
}

/// Pads dimensions, the last one first.
Lowering padding(Way way, Source source) {
  return [=](Call& call) {
    const bool is_forward = way == Way::Forward;
    auto x = is_forward ? call.value(0) : call.wide_value(0);
    const auto sizes = call.tensor(is_forward ? 0 : 1).sizes().vec(), pads = call.integers(is_forward ? 1 : 2);
    for (size_t i = 0; 2 * i < pads.size(); i++) {
      const auto d = x.rank() - 1 - static_cast<int64_t>(i), size = sizes[static_cast<size_t>(d)];
      Taps taps{{{}}, {}};
      for (int64_t place = -pads[2 * i]; place < size + pads[2 * i + 1]; place++) taps.places[0].push_back(source(place, size));
      x = mapped(way, x, d, size, taps);
    }
    call.give_rounded(x);
  };
}

}  // namespace

Value resampled(const Value& x, int64_t d, const Taps& taps) {
  Value sum;
  for (size_t k = 0; k < taps.places.size(); k++) {
    auto part = take(x, hlo::constants(taps.places[k], at::kLong), d);
    if (!taps.weights.empty()) part = part * weights_along(part, d, taps.weights[k]);
    sum = k ? sum + part : part;
  }
  return sum;
}

Value put_along(const Value& values, int64_t dimension, int64_t size, const Value& places) {
  auto order = all_dimensions(values.rank());
  std::rotate(order.begin(), order.begin() + dimension, order.begin() + dimension + places.rank());
  const auto turned = transpose(values, order);
  Sizes sizes{size};
  sizes.insert(sizes.end(), turned.sizes().begin() + places.rank(), turned.sizes().end());
  const auto sum = put(hlo::filled(0, {values.element(), sizes}), places, turned, Combine::Add);
  auto back = all_dimensions(sum.rank());
  std::rotate(back.begin(), back.begin() + dimension, back.begin() + dimension + 1);
  return transpose(sum, hlo::inverse(back));
}

Value resampled_gradient(const Value& gradient, int64_t d, int64_t size, const Taps& taps) {
  Value sum;
  for (size_t k = 0; k < taps.places.size(); k++) {
    const auto weighted = taps.weights.empty() ? gradient : gradient * weights_along(gradient, d, taps.weights[k]);
    const auto part = put_along(weighted, d, size, hlo::constants(taps.places[k], at::kLong));
    sum = k ? sum + part : part;
  }
  return sum;
}

Taps adaptive_windows(int64_t size, int64_t results) {
  const auto begin = [&](int64_t i) { return i * size / results; };
  const auto end = [&](int64_t i) { return ((i + 1) * size + results - 1) / results; };
  int64_t longest = 0;
  for (int64_t i = 0; i < results; i++) longest = std::max(longest, end(i) - begin(i));
  auto taps = empty_taps(static_cast<size_t>(longest), results);
  for (int64_t i = 0; i < results; i++) {
    for (int64_t k = 0; k < longest; k++) {
      const auto place = begin(i) + k;
      taps.places[static_cast<size_t>(k)][static_cast<size_t>(i)] = std::min(place, end(i) - 1);
      taps.weights[static_cast<size_t>(k)][static_cast<size_t>(i)] = place < end(i) ? 1.0 / static_cast<double>(end(i) - begin(i)) : 0;
    }
  }
  return taps;
}

void register_resampling() {
  const auto both_ways = [](const std::string& name, const auto& lowering) {
    add_kernels({{name, lowering(Way::Forward)}, {name + "_backward", lowering(Way::Gradient)}});
  };
  const auto upsample = [&](const std::string& name, Corners corners, MakeTaps make) {
    both_ways(name, [&](Way way) { return upsampling(way, corners, make); });
  };
  for (const std::string dimensions : {"1d", "2d", "3d"}) {
    upsample("upsample_nearest" + dimensions, Corners::Never, nearest);
    upsample("_upsample_nearest_exact" + dimensions, Corners::Never, nearest_exact);
    both_ways("reflection_pad" + dimensions, [](Way way) { return padding(way, mirrored); });
    both_ways("replication_pad" + dimensions, [](Way way) { return padding(way, nearest_inside); });
  }
  for (const auto* const name : {"upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"})
    upsample(name, Corners::MayBeAligned, linear);
  upsample("upsample_bicubic2d", Corners::MayBeAligned, cubic);
  upsample("_upsample_bilinear2d_aa", Corners::MayBeAligned, linear_antialiased);
  upsample("_upsample_bicubic2d_aa", Corners::MayBeAligned, cubic_antialiased);
  upsample("_upsample_lanczos2d_aa", Corners::MayBeAligned, lanczos_antialiased);
}

}  // namespace tessera::xla
