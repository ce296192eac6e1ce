// Convolutions and their gradients.
#include <fmt/format.h>

#include <numeric>

#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/lowerings/resampling.h"

namespace tessera::xla {
namespace {

/// Returns StableHLO's names of dimensions, such as "[b, f, 0, 1]" for two spatial dimensions.
std::string dimension_names(std::string_view letters, size_t spatial) {
  auto names = fmt::format("[{}, {}", letters[0], letters[1]);
  for (size_t i = 0; i < spatial; i++) names += fmt::format(", {}", i);
  return names + "]";
}

std::string names(std::string_view input, std::string_view filter, size_t spatial) {
  return fmt::format("{0}x{1}->{0}", dimension_names(input, spatial), dimension_names(filter, spatial));
}

/// How a convolution moves over its input.
struct Geometry {
  Sizes stride, padding, dilation;
  int64_t groups;
  std::optional<at::ScalarType> result = {};  // the type of the result, if it is not that of the arguments
  size_t spatial() const { return stride.size(); }
};

/// Computes a convolution whose result has the spatial sizes `sizes`. Elements of `x` after the last window are left out.
Value convolved(const Value& x, const Value& w, const Geometry& g, const Sizes& sizes) {
  Type type{g.result.value_or(x.element()), {x.size(0), w.size(0)}};
  type.sizes.insert(type.sizes.end(), sizes.begin(), sizes.end());
  Sizes high;
  for (size_t i = 0; i < g.spatial(); i++) {
    const auto reach = g.stride[i] * (sizes[i] - 1) + g.dilation[i] * (w.sizes()[i + 2] - 1) + 1;
    high.push_back(reach - x.sizes()[i + 2] - g.padding[i]);
  }
  return convolution(
      x, w, type, names("bf", "oi", g.spatial()),
      {.size = {}, .stride = g.stride, .padding_low = g.padding, .padding_high = high, .base_dilation = {}, .dilation = g.dilation},
      g.groups);
}

/// Computes a transposed convolution, which is also the gradient of a convolution's input. Dimension 1 of `w` has the channels of that
/// input.
Value transposed(const Value& y, const Value& w, const Geometry& g, const Sizes& sizes) {
  const auto channels = w.size(1), groups = g.groups, outputs = w.size(0) / groups;
  auto grouped = w.sizes();
  grouped.insert(grouped.begin(), groups);
  grouped[1] = outputs;
  Sizes order(grouped.size());
  std::iota(order.begin(), order.end(), 0);
  std::swap(order[1], order[2]);
  auto flat = w.sizes();
  flat[0] = groups * channels;
  flat[1] = outputs;
  Sizes spatial(g.spatial());
  std::iota(spatial.begin(), spatial.end(), 2);
  const auto filter = reverse(reshape(transpose(reshape(w, grouped), order), flat), spatial);
  Sizes low, high;
  for (size_t i = 0; i < g.spatial(); i++) {
    const auto reach = g.dilation[i] * (w.sizes()[i + 2] - 1);
    low.push_back(reach - g.padding[i]);
    high.push_back(sizes[i] + reach - low[i] - (g.stride[i] * (y.sizes()[i + 2] - 1) + 1));
  }
  Type type{g.result.value_or(y.element()), {y.size(0), groups * channels}};
  type.sizes.insert(type.sizes.end(), sizes.begin(), sizes.end());
  return convolution(
      y, filter, type, names("bf", "oi", g.spatial()),
      {.size = {}, .stride = {}, .padding_low = low, .padding_high = high, .base_dilation = g.stride, .dilation = g.dilation}, groups);
}

/// Computes the gradient of a convolution's filter from the convolution's input `x` and the gradient `y` of its result.
Value filter_gradient(const Value& x, const Value& y, const Geometry& g, const Type& filter) {
  Sizes high;
  for (size_t i = 0; i < g.spatial(); i++) {
    const auto reach = g.dilation[i] * (filter.sizes[i + 2] - 1) + g.stride[i] * (y.sizes()[i + 2] - 1) + 1;
    high.push_back(reach - x.sizes()[i + 2] - g.padding[i]);
  }
  return convolution(
      x, y, {x.element(), filter.sizes}, names("fb", "io", g.spatial()),
      {.size = {}, .stride = g.dilation, .padding_low = g.padding, .padding_high = high, .base_dilation = {}, .dilation = g.stride}, 1,
      g.groups);
}

Sizes spatial_sizes(const Value& x) {
  return {x.sizes().begin() + 2, x.sizes().end()};
}

Geometry geometry_of(const Call& call, size_t count) {
  return {one_for_each(call.integers(3), count, 1), one_for_each(call.integers(4), count, 0), one_for_each(call.integers(5), count, 1),
          call.integer(8)};
}

void convolution(Call& call) {
  const auto x = call.value(0), w = call.value(1);
  const auto count = x.sizes().size() - 2;
  auto g = geometry_of(call, count);
  if (call.has(2)) g.result = hlo::wide(x.element());  // so that the sum with the bias is rounded once
  const bool is_transposed = call.flag(6);
  const auto extra = one_for_each(call.integers(7), count, 0);
  Sizes sizes;
  for (size_t i = 0; i < count; i++) {
    const auto size = x.sizes()[i + 2], reach = g.dilation[i] * (w.sizes()[i + 2] - 1) + 1;
    sizes.push_back(is_transposed ? (size - 1) * g.stride[i] - 2 * g.padding[i] + reach + extra[i]
                                  : (size + 2 * g.padding[i] - reach) / g.stride[i] + 1);
  }
  auto y = is_transposed ? transposed(x, w, g, sizes) : convolved(x, w, g, sizes);
  if (call.has(2)) y = y + broadcast(call.value(2, y.element()), y.sizes(), Sizes{1});
  call.give(convert(y, x.element()));
}

void convolution_gradient(Call& call) {
  const auto dy = call.value(0), x = call.value(1), w = call.value(2);
  const auto count = x.sizes().size() - 2;
  const auto g = geometry_of(call, count);
  const bool is_transposed = call.flag(6);
  const auto mask = call[9].toBoolList();
  std::vector<Value> results(3);
  if (mask[0]) results[0] = is_transposed ? convolved(dy, w, g, spatial_sizes(x)) : transposed(dy, w, g, spatial_sizes(x));
  if (mask[1]) results[1] = is_transposed ? filter_gradient(dy, x, g, w.type()) : filter_gradient(x, dy, g, w.type());
  if (mask[2]) {
    const auto wide = convert(dy, hlo::wide(dy.element()));  // because many numbers are added
    results[2] = convert(hlo::sum(wide, all_but(dy.rank(), 1)), dy.element());
  }
  call.give(results);
}

// --- windows as columns ---

/// Returns, for each place of the kernel and each window along one dimension, the place in the argument.
Value window_places(int64_t kernel, int64_t windows, int64_t dilation, int64_t stride) {
  const Type type{at::kLong, {kernel, windows}};
  const auto along = [&](int64_t d, int64_t step) { return hlo::iota(type, d) * hlo::filled(step, type); };
  return along(0, dilation) + along(1, stride);
}

struct Columns {
  Sizes kernel, dilation, padding, stride, padded, windows;
  Columns(const Call& call, size_t first, const Sizes& sizes)
      : kernel(one_for_each(call.integers(first), 2, 1)),
        dilation(one_for_each(call.integers(first + 1), 2, 1)),
        padding(one_for_each(call.integers(first + 2), 2, 0)),
        stride(one_for_each(call.integers(first + 3), 2, 1)) {
    for (size_t i = 0; i < 2; i++) {
      padded.push_back(sizes[i] + 2 * padding[i]);
      windows.push_back((padded[i] - dilation[i] * (kernel[i] - 1) - 1) / stride[i] + 1);
    }
  }
  Value places(size_t i) const { return window_places(kernel[i], windows[i], dilation[i], stride[i]); }
};

void windows_to_columns(Call& call) {
  const auto x = call.value(0);
  const Columns c(call, 1, {x.sizes().end()[-2], x.sizes().end()[-1]});
  const auto rank = x.rank();
  Sizes low(static_cast<size_t>(rank), 0);
  low[static_cast<size_t>(rank) - 2] = c.padding[0];
  low[static_cast<size_t>(rank) - 1] = c.padding[1];
  const auto padded = hlo::pad(x, hlo::constant(0, x.element()), low, low, Sizes(low.size(), 0));
  const auto picked = take(take(padded, c.places(1), rank - 1), c.places(0), rank - 2);
  auto order = all_dimensions(rank + 2);
  std::swap(order[static_cast<size_t>(rank) - 1], order[static_cast<size_t>(rank)]);
  Sizes sizes(x.sizes().begin(), x.sizes().end() - 3);
  sizes.push_back(x.sizes().end()[-3] * c.kernel[0] * c.kernel[1]);
  sizes.push_back(c.windows[0] * c.windows[1]);
  call.give(reshape(transpose(picked, order), sizes));
}

void columns_to_windows(Call& call) {
  const auto x = call.wide_value(0);
  const auto sizes = one_for_each(call.integers(1), 2, 1);
  const Columns c(call, 2, sizes);
  Sizes split(x.sizes().begin(), x.sizes().end() - 2);
  split.push_back(x.sizes().end()[-2] / (c.kernel[0] * c.kernel[1]));
  const auto first = static_cast<int64_t>(split.size());
  for (const auto size : {c.kernel[0], c.kernel[1], c.windows[0], c.windows[1]}) split.push_back(size);
  auto order = all_dimensions(first + 4);
  std::swap(order[static_cast<size_t>(first) + 1], order[static_cast<size_t>(first) + 2]);
  const auto turned = transpose(reshape(x, split), order);
  auto whole = put_along(put_along(turned, first, c.padded[0], c.places(0)), first + 1, c.padded[1], c.places(1));
  for (int64_t i = 0; i < 2; i++) {
    const auto pad = c.padding[static_cast<size_t>(i)];
    whole = slice(whole, first + i, pad, pad + sizes[static_cast<size_t>(i)]);
  }
  call.give_rounded(whole);
}

/// The gradient of unfold, which makes windows of one dimension and puts their elements along a new last dimension.
void unfold_gradient(Call& call) {
  const auto g = call.wide_value(0);
  const auto sizes = call.integers(1);
  const auto along = call.integer(2), size = call.integer(3), step = call.integer(4);
  if (sizes.empty()) return call.give_rounded(reshape(g, {}));
  const auto d = wrapped(along, static_cast<int64_t>(sizes.size()));
  auto order = all_dimensions(g.rank());
  order.pop_back();
  order.insert(order.begin() + d, g.rank() - 1);  // puts the place in the window just before the number of the window
  const auto places = window_places(size, g.size(d), 1, step);
  const auto sum = put_along(transpose(g, order), d, sizes[static_cast<size_t>(d)], places);
  call.give_rounded(sum);
}

}  // namespace

void register_convolutions() {
  add_kernels({
      {"convolution_overrideable", convolution},
      {"convolution_backward_overrideable", convolution_gradient},
      {"im2col", windows_to_columns},
      {"col2im", columns_to_windows},
      {"unfold_backward", unfold_gradient},
  });
}

}  // namespace tessera::xla
