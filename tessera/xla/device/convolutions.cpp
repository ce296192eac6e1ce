// Convolutions and their gradients, pooling, batch norm.
#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::plus;
using hlo::minus;
using hlo::times;
using hlo::fixed;
using hlo::wide;

Sizes all_but(int64_t rank, int64_t kept) {
  Sizes others;
  for (int64_t i = 0; i < rank; i++) {
    if (i != kept) others.push_back(i);
  }
  return others;
}

/// One number for each spatial dimension.
Sizes each(const Sizes& given, size_t count, int64_t otherwise) {
  if (given.empty()) return Sizes(count, otherwise);
  return given.size() == count ? given : Sizes(count, given[0]);
}

/// "[b, f, 0, 1]" for two spatial dimensions.
std::string dimension_names(const char* first, const char* second, size_t spatial) {
  auto names = fmt::format("[{}, {}", first, second);
  for (size_t i = 0; i < spatial; i++) names += fmt::format(", {}", i);
  return names + "]";
}

std::string names(const char* a, const char* b, const char* c, const char* d, const char* e, const char* f, size_t spatial) {
  return dimension_names(a, b, spatial) + "x" + dimension_names(c, d, spatial) + "->" + dimension_names(e, f, spatial);
}

/// How a convolution moves over its input.
struct Geometry {
  Sizes stride, padding, dilation;
  int64_t groups;
  size_t spatial() const { return stride.size(); }
};

Value convolved(const Value& x, const Value& w, const Geometry& g) {
  Type type{x.element(), {x.sizes()[0], w.sizes()[0]}};
  for (size_t i = 0; i < g.spatial(); i++) {
    const auto reach = g.dilation[i] * (w.sizes()[i + 2] - 1) + 1;
    type.sizes.push_back((x.sizes()[i + 2] + 2 * g.padding[i] - reach) / g.stride[i] + 1);
  }
  return hlo::convolution(x, w, type, names("b", "f", "o", "i", "b", "f", g.spatial()),
                          {.size = {}, .stride = g.stride, .padding_low = g.padding, .padding_high = g.padding, .base_dilation = {}, .dilation = g.dilation},
                          g.groups);
}

/// The gradient of a convolution's input, which is what a transposed convolution computes. `w` has the input's channels second.
Value transposed(const Value& y, const Value& w, const Geometry& g, const Sizes& sizes) {
  const auto channels = w.sizes()[1], groups = g.groups, outputs = w.sizes()[0] / groups;
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
  const auto filter = hlo::reverse(hlo::reshape(hlo::transpose(hlo::reshape(w, grouped), order), flat), spatial);
  Sizes low, high;
  for (size_t i = 0; i < g.spatial(); i++) {
    const auto reach = g.dilation[i] * (w.sizes()[i + 2] - 1);
    low.push_back(reach - g.padding[i]);
    high.push_back(sizes[i] + reach - low[i] - (g.stride[i] * (y.sizes()[i + 2] - 1) + 1));
  }
  Type type{y.element(), {y.sizes()[0], groups * channels}};
  type.sizes.insert(type.sizes.end(), sizes.begin(), sizes.end());
  return hlo::convolution(y, filter, type, names("b", "f", "o", "i", "b", "f", g.spatial()),
                          {.size = {}, .stride = {}, .padding_low = low, .padding_high = high, .base_dilation = g.stride, .dilation = g.dilation}, groups);
}

/// The gradient of the filter that makes `y` of `x`.
Value filter_gradient(const Value& x, const Value& y, const Geometry& g, const Type& filter) {
  Sizes high;
  for (size_t i = 0; i < g.spatial(); i++) {
    const auto reach = g.dilation[i] * (filter.sizes[i + 2] - 1) + g.stride[i] * (y.sizes()[i + 2] - 1) + 1;
    high.push_back(reach - x.sizes()[i + 2] - g.padding[i]);
  }
  return hlo::convolution(x, y, {x.element(), filter.sizes}, names("f", "b", "i", "o", "f", "b", g.spatial()),
                          {.size = {}, .stride = g.dilation, .padding_low = g.padding, .padding_high = high, .base_dilation = {}, .dilation = g.stride}, 1,
                          g.groups);
}

Sizes spatial_sizes(const Value& x) { return {x.sizes().begin() + 2, x.sizes().end()}; }

void convolution(Call& call) {
  const auto x = call.value(0), w = call.value(1);
  const auto count = x.sizes().size() - 2;
  const Geometry g{each(call.integers(3), count, 1), each(call.integers(4), count, 0), each(call.integers(5), count, 1), call.integer(8)};
  Value y;
  if (call.flag(6)) {
    const auto extra = each(call.integers(7), count, 0);
    Sizes sizes;
    for (size_t i = 0; i < count; i++) {
      sizes.push_back((x.sizes()[i + 2] - 1) * g.stride[i] - 2 * g.padding[i] + g.dilation[i] * (w.sizes()[i + 2] - 1) + extra[i] + 1);
    }
    y = transposed(x, w, g, sizes);
  } else {
    y = convolved(x, w, g);
  }
  if (call.has(2)) y = plus(y, hlo::broadcast(call.value(2), y.sizes(), Sizes{1}));
  call.give(y);
}

void convolution_gradient(Call& call) {
  const auto dy = call.value(0), x = call.value(1), w = call.value(2);
  const auto count = x.sizes().size() - 2;
  const Geometry g{each(call.integers(3), count, 1), each(call.integers(4), count, 0), each(call.integers(5), count, 1), call.integer(8)};
  const bool is_transposed = call.flag(6);
  const auto mask = call[9].toBoolList();
  std::vector<Value> results(3);
  if (mask[0]) results[0] = is_transposed ? convolved(dy, w, g) : transposed(dy, w, g, spatial_sizes(x));
  if (mask[1]) results[1] = is_transposed ? filter_gradient(dy, x, g, w.type()) : filter_gradient(x, dy, g, w.type());
  if (mask[2]) results[2] = hlo::sum(dy, all_but(dy.rank(), 1));
  call.give(results);
}

// --- pooling ---

/// A window over the last two dimensions of two, three or four.
struct Pool {
  hlo::Window window;
  Sizes kernel, stride, padding, dilation;
};
Pool pool_of(const Value& x, const Sizes& kernel, const Sizes& stride, const Sizes& padding, const Sizes& dilation, bool ceil) {
  Pool p;
  p.kernel = each(kernel, 2, 1);
  p.stride = each(stride, 2, 0);
  if (stride.empty()) p.stride = p.kernel;
  p.padding = each(padding, 2, 0);
  p.dilation = each(dilation, 2, 1);
  const auto rank = x.sizes().size();
  p.window = {.size = Sizes(rank, 1), .stride = Sizes(rank, 1), .padding_low = Sizes(rank, 0), .padding_high = Sizes(rank, 0), .base_dilation = {}, .dilation = Sizes(rank, 1)};
  for (size_t i = 0; i < 2; i++) {
    const auto d = rank - 2 + i;
    p.window.size[d] = p.kernel[i];
    p.window.stride[d] = p.stride[i];
    p.window.padding_low[d] = p.window.padding_high[d] = p.padding[i];
    p.window.dilation[d] = p.dilation[i];
    if (!ceil) continue;
    const auto size = x.sizes()[d], reach = p.dilation[i] * (p.kernel[i] - 1) + 1, room = size + 2 * p.padding[i] - reach;
    auto count = (room + p.stride[i] - 1) / p.stride[i] + 1;
    if ((count - 1) * p.stride[i] >= size + p.padding[i]) count--;  // the last window begins inside
    p.window.padding_high[d] += std::max<int64_t>(0, (count - 1) * p.stride[i] - room);
  }
  return p;
}

void max_pool(Call& call) {
  const auto x = call.value(0);
  const auto p = pool_of(x, call.integers(1), call.integers(2), call.integers(3), call.integers(4), call.flag(5));
  const auto largest = hlo::reduce_window(x, Combine::Max, hlo::lowest(x.element()), p.window);
  // Where each stands: the first place in its window that has the value.
  const auto rank = x.sizes().size(), height = rank - 2, width = rank - 1;
  const auto places = plus(times(hlo::iota({at::kLong, x.sizes()}, static_cast<int64_t>(height)),
                                 hlo::broadcast(hlo::constant(x.sizes()[width], at::kLong), x.sizes(), {})),
                           hlo::iota({at::kLong, x.sizes()}, static_cast<int64_t>(width)));
  const Sizes none(rank, 0);
  const auto padded = hlo::pad(x, hlo::lowest(x.element()), p.window.padding_low, p.window.padding_high, none);
  const auto padded_places = hlo::pad(places, hlo::constant(int64_t{-1}, at::kLong), p.window.padding_low, p.window.padding_high, none);
  auto found = hlo::broadcast(hlo::constant(int64_t{-1}, at::kLong), largest.sizes(), {});
  for (auto i = p.kernel[0] - 1; i >= 0; i--) {
    for (auto k = p.kernel[1] - 1; k >= 0; k--) {
      Sizes start(rank, 0), limit = padded.sizes(), strides(rank, 1);
      start[height] = i * p.dilation[0];
      start[width] = k * p.dilation[1];
      for (const auto d : {height, width}) {
        strides[d] = p.window.stride[d];
        limit[d] = start[d] + (largest.sizes()[d] - 1) * strides[d] + 1;
      }
      const auto here = hlo::compare("EQ", hlo::slice(padded, start, limit, strides), largest);
      found = hlo::select(here, hlo::slice(padded_places, start, limit, strides), found);
    }
  }
  call.give(std::vector{largest, found});
}

void max_pool_gradient(Call& call) {
  const auto g = call.value(0), x = call.value(1), places = call.value(7);
  // Planes one behind the other: each gradient is added where its value stood.
  int64_t planes = 1;
  const auto rank = x.sizes().size();
  for (size_t i = 0; i + 2 < rank; i++) planes *= x.sizes()[i];
  const auto plane = x.sizes()[rank - 2] * x.sizes()[rank - 1], taken = g.sizes()[rank - 2] * g.sizes()[rank - 1];
  const Type list{at::kLong, {planes, taken}};
  const auto first = times(hlo::iota(list, 0), hlo::broadcast(hlo::constant(plane, at::kLong), list.sizes, {}));
  const auto where = hlo::reshape(plus(first, hlo::reshape(places, list.sizes)), {planes * taken});
  const auto zeros = hlo::broadcast(hlo::constant(int64_t{0}, g.element()), {planes * plane}, {});
  call.give(hlo::reshape(hlo::put(zeros, where, hlo::reshape(g, {planes * taken}), Combine::Add), x.sizes()));
}

/// How many values each window has.
Value counts(const Value& x, const Pool& p, bool with_padding, const Call& call, size_t divisor) {
  auto window = p.window;
  if (call.has(divisor)) return fixed(hlo::reduce_window(x, Combine::Add, hlo::constant(int64_t{0}, x.element()), window), static_cast<double>(call.integer(divisor)));
  auto ones = fixed(x, 1);
  if (with_padding) {  // what ceil_mode adds at the end never counts
    Sizes low(x.sizes().size(), 0), none = low;
    for (size_t i = 0; i < 2; i++) low[x.sizes().size() - 2 + i] = p.padding[i];
    ones = hlo::pad(ones, hlo::constant(int64_t{1}, x.element()), low, low, none);
    for (size_t d = 0; d < low.size(); d++) {
      window.padding_low[d] = 0;
      window.padding_high[d] -= low[d];
    }
  }
  return hlo::reduce_window(ones, Combine::Add, hlo::constant(int64_t{0}, x.element()), window);
}

void average_pool(Call& call) {
  const auto type = call.result_type();
  const auto x = call.value(0, wide(type));
  const auto p = pool_of(x, call.integers(1), call.integers(2), call.integers(3), {}, call.flag(4));
  const auto sum = hlo::reduce_window(x, Combine::Add, hlo::constant(int64_t{0}, x.element()), p.window);
  call.give(hlo::convert(hlo::binary("divide", sum, counts(x, p, call.flag(5), call, 6)), type));
}

/// Each value of the gradient goes to all places of its window.
Value spread_over_windows(const Value& g, const Value& x, const Pool& p) {
  const auto rank = x.sizes().size();
  Sizes low(rank, 0), high(rank, 0), interior(rank, 0);
  hlo::Window window{.size = p.window.size, .stride = {}, .padding_low = {}, .padding_high = {}, .base_dilation = {}, .dilation = {}};
  for (size_t d = rank - 2; d < rank; d++) {
    interior[d] = p.window.stride[d] - 1;
    low[d] = p.window.size[d] - 1 - p.window.padding_low[d];
    high[d] = x.sizes()[d] + p.window.size[d] - 1 - low[d] - ((g.sizes()[d] - 1) * p.window.stride[d] + 1);
  }
  const auto zero = hlo::constant(int64_t{0}, x.element());
  return hlo::reduce_window(hlo::pad(g, zero, low, high, interior), Combine::Add, zero, window);
}

void average_pool_gradient(Call& call) {
  const auto type = call.result_type();
  const auto g = call.value(0, wide(type)), x = call.value(1, wide(type));
  const auto p = pool_of(x, call.integers(2), call.integers(3), call.integers(4), {}, call.flag(5));
  call.give(hlo::convert(spread_over_windows(hlo::binary("divide", g, counts(x, p, call.flag(6), call, 7)), x, p), type));
}

/// Windows of equal size, where the sizes allow it.
std::optional<Pool> adaptive_pool(const Value& x, const Sizes& result) {
  const auto rank = x.sizes().size();
  Sizes kernel;
  for (size_t i = 0; i < 2; i++) {
    const auto size = x.sizes()[rank - 2 + i];
    if (result[i] == 0 || size % result[i]) return std::nullopt;
    kernel.push_back(size / result[i]);
  }
  return pool_of(x, kernel, {}, {}, {}, false);
}

void adaptive_average_pool(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  const auto x = call.value(0, wide(type));
  const auto p = adaptive_pool(x, each(call.integers(1), 2, 1));
  if (!p) throw UsageError("XLA devices average adaptively where the result's sizes divide the input's");
  const auto sum = hlo::reduce_window(x, Combine::Add, hlo::constant(int64_t{0}, x.element()), p->window);
  call.give(hlo::convert(hlo::binary("divide", sum, fixed(sum, static_cast<double>(p->kernel[0] * p->kernel[1]))), type));
}

void adaptive_average_pool_gradient(Call& call) {
  const auto type = call.tensor(1).scalar_type();
  const auto g = call.value(0, wide(type)), x = call.value(1, wide(type));
  const auto p = adaptive_pool(x, {g.sizes().end()[-2], g.sizes().end()[-1]});
  if (!p) throw UsageError("XLA devices average adaptively where the result's sizes divide the input's");
  call.give(hlo::convert(spread_over_windows(hlo::binary("divide", g, fixed(g, static_cast<double>(p->kernel[0] * p->kernel[1]))), x, *p), type));
}

// --- batch norm ---

struct BatchMean {
  Value mean, variance;  // one for each channel
  double count;
};
BatchMean batch_mean(const Value& x) {
  const auto others = all_but(x.rank(), 1);
  double count = 1;
  for (const auto d : others) count *= static_cast<double>(x.sizes()[static_cast<size_t>(d)]);
  const auto sum = hlo::sum(x, others);
  const auto mean = hlo::binary("divide", sum, fixed(sum, count));
  const auto centred = minus(x, hlo::broadcast(mean, x.sizes(), Sizes{1}));
  const auto squares = hlo::sum(times(centred, centred), others);
  return {mean, hlo::binary("divide", squares, fixed(squares, count)), count};
}

Value by_channel(const Value& values, const Value& x) { return hlo::broadcast(values, x.sizes(), Sizes{1}); }

void update_running(const Call& call, size_t which, const Value& now, double momentum) {
  if (!call.has(which)) return;
  const auto before = call.value(which, now.element());
  write(call.tensor(which), plus(times(before, hlo::full(1 - momentum, before.type())), times(now, hlo::full(momentum, now.type()))));
}

void batch_norm(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  const auto x = call.value(0, wide(type));
  const bool training = call.flag(5);
  const double momentum = call.number(6), epsilon = call.number(7);
  Value mean, variance;
  if (training) {
    const auto batch = batch_mean(x);
    mean = batch.mean;
    variance = batch.variance;
    update_running(call, 3, mean, momentum);
    update_running(call, 4, times(variance, fixed(variance, batch.count / std::max(1.0, batch.count - 1))), momentum);
  } else {
    mean = call.value(3, x.element());
    variance = call.value(4, x.element());
  }
  const auto inverse = hlo::unary("rsqrt", plus(variance, fixed(variance, epsilon)));
  auto y = times(minus(x, by_channel(mean, x)), by_channel(inverse, x));
  if (call.has(1)) y = times(y, by_channel(call.value(1, x.element()), x));
  if (call.has(2)) y = plus(y, by_channel(call.value(2, x.element()), x));
  const auto nothing = hlo::broadcast(hlo::constant(0.0, x.element()), {0}, {});
  call.give(std::vector{hlo::convert(y, type), training ? mean : nothing, training ? inverse : nothing});
}

void batch_norm_gradient(Call& call) {
  const auto type = call.tensor(1).scalar_type();
  const auto element = wide(type);
  const auto g = call.value(0, element), x = call.value(1, element);
  const bool training = call.flag(7);
  const auto mask = call[9].toBoolList();
  const auto others = all_but(x.rank(), 1);
  Value mean, inverse;
  if (training) {
    mean = call.value(5, element);
    inverse = call.value(6, element);
  } else {
    mean = call.value(3, element);
    const auto variance = call.value(4, element);
    inverse = hlo::unary("rsqrt", plus(variance, fixed(variance, call.number(8))));
  }
  const auto normal = times(minus(x, by_channel(mean, x)), by_channel(inverse, x));
  const auto sum = hlo::sum(g, others), weighted = hlo::sum(times(g, normal), others);
  std::vector<Value> results(3);
  if (mask[0]) {
    auto dx = g;
    if (training) {
      const double count = static_cast<double>(c10::multiply_integers(x.sizes())) / static_cast<double>(x.sizes()[1]);
      const auto average = [&](const Value& of) { return by_channel(hlo::binary("divide", of, fixed(of, count)), x); };
      dx = minus(minus(dx, average(sum)), times(normal, average(weighted)));
    }
    dx = times(dx, by_channel(inverse, x));
    if (call.has(2)) dx = times(dx, by_channel(call.value(2, element), x));
    results[0] = hlo::convert(dx, type);
  }
  const auto parameter_type = call.has(2) ? call.tensor(2).scalar_type() : type;
  if (mask[1]) results[1] = hlo::convert(weighted, parameter_type);
  if (mask[2]) results[2] = hlo::convert(sum, parameter_type);
  call.give(results);
}

const Kernel kConvolutions[] = {
    {"convolution_overrideable", convolution},
    {"convolution_backward_overrideable", convolution_gradient},
    {"max_pool2d_with_indices.out", max_pool},
    {"max_pool2d_with_indices_backward.grad_input", max_pool_gradient},
    {"avg_pool2d.out", average_pool},
    {"avg_pool2d_backward.grad_input", average_pool_gradient},
    {"_adaptive_avg_pool2d", adaptive_average_pool},
    {"_adaptive_avg_pool2d_backward", adaptive_average_pool_gradient},
    {"native_batch_norm", batch_norm},
    {"native_batch_norm_backward", batch_norm_gradient},
};

}  // namespace

void register_convolutions() { add_kernels(kConvolutions); }

}  // namespace tessera::xla
