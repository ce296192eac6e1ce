// Pooling over the last two or three dimensions.
#include <fmt/format.h>

#include <span>

#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/lowerings/resampling.h"

namespace tessera::xla {
namespace {

struct Pool {
  size_t first;  // the first pooled dimension; the pooled dimensions are the last ones
  Sizes kernel;
  hlo::Window window;
};

/// Reads the arguments from `first` on: the kernel, the stride, the padding, the dilation if the operator has one, and ceil_mode, which
/// says whether windows may reach over the end.
Pool pool_of(const Call& call, const Sizes& sizes, size_t spatial, size_t first, bool has_dilation = false) {
  const auto rank = sizes.size();
  Pool p{.first = rank - spatial,
         .kernel = one_for_each(call.integers(first), spatial, 1),
         .window = {.size = Sizes(rank, 1),
                    .stride = Sizes(rank, 1),
                    .padding_low = Sizes(rank, 0),
                    .padding_high = Sizes(rank, 0),
                    .base_dilation = {},
                    .dilation = Sizes(rank, 1)}};
  const auto named = call.integers(first + 1), stride = named.empty() ? p.kernel : one_for_each(named, spatial, 1);
  const auto padding = one_for_each(call.integers(first + 2), spatial, 0);
  const auto dilation = one_for_each(has_dilation ? call.integers(first + 3) : Sizes(), spatial, 1);
  const bool reaches_over = call.flag(first + 3 + has_dilation);
  for (size_t i = 0; i < spatial; i++) {
    const auto d = p.first + i;
    p.window.size[d] = p.kernel[i];
    p.window.stride[d] = stride[i];
    p.window.padding_low[d] = p.window.padding_high[d] = padding[i];
    p.window.dilation[d] = dilation[i];
    if (!reaches_over) continue;
    const auto reach = dilation[i] * (p.kernel[i] - 1) + 1, room = sizes[d] + 2 * padding[i] - reach;
    auto count = (room + stride[i] - 1) / stride[i] + 1;
    if ((count - 1) * stride[i] >= sizes[d] + padding[i]) count--;  // the last window must begin in the input or in the padding before it
    p.window.padding_high[d] += std::max<int64_t>(0, (count - 1) * stride[i] - room);
  }
  return p;
}

/// Numbers the places of each plane or volume.
Value counted_places(const Sizes& sizes, size_t spatial) {
  const Type type{at::kLong, sizes};
  auto places = hlo::filled(0, {at::kLong, sizes});
  for (size_t d = sizes.size() - spatial; d < sizes.size(); d++) {
    places = places * sizes[d] + hlo::iota(type, static_cast<int64_t>(d));
  }
  return places;
}

/// Calls `visit` with each place of a box. The last dimension varies fastest.
template <class Visit>
void for_each_place(const Sizes& box, const Visit& visit) {
  Sizes at(box.size(), 0);
  for (int64_t left = c10::multiply_integers(box); left > 0; left--) {
    visit(at);
    for (size_t d = box.size(); d-- > 0 && ++at[d] == box[d];) at[d] = 0;
  }
}

/// The largest value so far and its place. Of equal values the first counts; NaN is larger than all, and the last NaN counts.
struct Largest {
  Value value, place;
  void take(const Value& other, const Value& other_place) {
    if (!value) {
      value = other;
      place = other_place;
      return;
    }
    auto wins = other > value;
    if (c10::isFloatingType(value.element())) wins = wins | is_nan(other);
    wins = wins | (place < 0);  // any value replaces padding
    value = select(wins, other, value);
    place = select(wins, other_place, place);
  }
};

/// The most places that a lowered window may have, because each place adds operations to the program. Larger windows run on the CPU.
constexpr int64_t kMostPlaces = 256;

void expect_few_places(const Sizes& window) {
  if (c10::multiply_integers(window) > kMostPlaces) throw NotLowered();
}

/// Gives the maxima of windows that divide the places evenly. `results` is the number of windows in each dimension.
void give_largest_of_parts(Call& call, const Value& x, size_t spatial, const Sizes& results) {
  auto sizes = x.sizes(), split = sizes;
  Sizes inside;
  split.resize(sizes.size() - spatial);
  for (size_t i = 0; i < spatial; i++) {
    auto& size = sizes[sizes.size() - spatial + i];
    split.push_back(results[i]);
    inside.push_back(static_cast<int64_t>(split.size()));
    split.push_back(size / results[i]);
    size = results[i];
  }
  const auto parts = reshape(x, split), places = reshape(counted_places(x.sizes(), spatial), split);
  const auto values = maximum(parts, inside);
  const auto is_largest = compare("EQ", parts, spread(values, parts, inside));
  auto place = smallest_of(select(is_largest, places, broadcast(hlo::highest(at::kLong), split, {})), inside);
  if (c10::isFloatingType(parts.element())) {
    const auto last = maximum(select(is_nan(parts), places, -1), inside);
    place = select(last < 0, place, last);
  }
  call.give({values, place});
}

Lowering max_pool(size_t spatial) {
  return [=](Call& call) {
    const auto x = call.value(0);
    const auto p = pool_of(call, x.sizes(), spatial, 1, /*has_dilation=*/true);
    const auto& window = p.window;
    const Sizes none(x.rank(), 0);
    if (std::ranges::equal(p.kernel, std::span(x.sizes()).last(spatial)) && window.padding_low == none &&
        window.dilation == Sizes(x.rank(), 1)) {
      return give_largest_of_parts(call, x, spatial, Sizes(spatial, 1));
    }
    expect_few_places(p.kernel);
    const auto padded = [&](const Value& of, const Value& fill) { return pad(of, fill, window.padding_low, window.padding_high, none); };
    const auto values = padded(x, hlo::lowest(x.element()));
    const auto places = padded(counted_places(x.sizes(), spatial), hlo::constant(-1, at::kLong));
    const auto results = reduce_window(x, Combine::Max, hlo::lowest(x.element()), window);
    Largest found;
    for_each_place(p.kernel, [&](const Sizes& at) {
      Sizes start = none, limit = values.sizes();
      for (size_t i = 0; i < spatial; i++) {
        const auto d = p.first + i;
        start[d] = at[i] * window.dilation[d];
        limit[d] = start[d] + (results.size(d) - 1) * window.stride[d] + 1;
      }
      found.take(slice(values, start, limit, window.stride), slice(places, start, limit, window.stride));
    });
    call.give({results, found.place});
  };
}

/// Puts values into planes or volumes of these sizes; `combine` joins values that go to one place.
Value put_into_planes(const Value& values, const Value& places, const Sizes& sizes, size_t spatial, Combine combine) {
  const auto area = [&](const Sizes& of) {
    return c10::multiply_integers(of.begin() + static_cast<ptrdiff_t>(of.size() - spatial), of.end());
  };
  const int64_t plane = area(sizes), taken = area(values.sizes()), planes = plane ? c10::multiply_integers(sizes) / plane : 0;
  const Type list{at::kLong, {planes, taken}};
  const auto first = hlo::iota(list, 0) * hlo::filled(plane, list);
  const auto where = flat(first + reshape(places, list.sizes));
  const auto zeros = hlo::filled(0, {values.element(), {planes * plane}});
  return reshape(put(zeros, where, flat(values), combine), sizes);
}

/// `places` is the index of the argument that has the place of each maximum in the input.
Lowering max_pool_gradient(size_t spatial, size_t places) {
  return [=](Call& call) {
    const auto gradient = put_into_planes(call.wide_value(0), call.value(places), call.tensor(1).sizes().vec(), spatial, Combine::Add);
    call.give_rounded(gradient);
  };
}

Lowering max_unpool(size_t spatial) {
  return [=](Call& call) {
    auto sizes = call.tensor(0).sizes().vec();
    std::ranges::copy(call.integers(2), sizes.end() - static_cast<ptrdiff_t>(spatial));
    call.give(put_into_planes(call.value(0), call.value(1), sizes, spatial, Combine::Second));
  };
}

// --- means ---

/// How many values each window has. Argument `first` says whether padding counts, and the next argument may give a divisor instead.
Value counts(const Value& x, const Pool& p, const Call& call, size_t first) {
  auto window = p.window;
  const auto zero = hlo::constant(0, x.element());
  auto ones = fixed(x, 1);
  const bool padding_counts = call.flag(first);
  if (call.has(first + 1)) return fixed(reduce_window(ones, Combine::Add, zero, window), static_cast<double>(call.integer(first + 1)));
  if (padding_counts) {  // places that ceil_mode adds at the end never count
    const Sizes none(x.rank(), 0), low = std::exchange(window.padding_low, none);
    ones = pad(ones, hlo::constant(1, x.element()), low, low, none);
    for (size_t d = 0; d < low.size(); d++) window.padding_high[d] -= low[d];
  }
  return reduce_window(ones, Combine::Add, zero, window);
}

Lowering average_pool(size_t spatial) {
  return [=](Call& call) {
    const auto x = call.wide_value(0);
    const auto p = pool_of(call, x.sizes(), spatial, 1);
    const auto sum = reduce_window(x, Combine::Add, hlo::constant(0, x.element()), p.window);
    const auto count = counts(x, p, call, 5);
    call.give_rounded(sum / count);
  };
}

/// Adds each value of the gradient to all places of its window.
Value spread_over_windows(const Value& g, const Value& x, const Pool& p) {
  Sizes low(x.rank(), 0), high = low, interior = low;
  for (size_t d = p.first; d < low.size(); d++) {
    interior[d] = p.window.stride[d] - 1;
    low[d] = p.window.size[d] - 1 - p.window.padding_low[d];
    high[d] = x.size(d) + p.window.size[d] - 1 - low[d] - ((g.size(d) - 1) * p.window.stride[d] + 1);
  }
  const auto zero = hlo::constant(0, x.element());
  return reduce_window(pad(g, zero, low, high, interior), Combine::Add, zero,
                       {.size = p.window.size, .stride = {}, .padding_low = {}, .padding_high = {}, .base_dilation = {}, .dilation = {}});
}

Lowering average_pool_gradient(size_t spatial) {
  return [=](Call& call) {
    const auto g = call.wide_value(0), x = call.wide_value(1);
    const auto p = pool_of(call, x.sizes(), spatial, 2);
    call.give_rounded(spread_over_windows(g / counts(x, p, call, 6), x, p));
  };
}

// --- windows that divide a dimension as evenly as they can ---

Value averaged(const Value& x, int64_t d, int64_t results) {
  const auto size = x.size(d);
  if (results == 0 || size % results) return resampled(x, d, adaptive_windows(size, results));
  auto split = x.sizes();
  split[static_cast<size_t>(d)] = results;
  split.insert(split.begin() + d + 1, size / results);
  return mean_of(reshape(x, split), {d + 1});
}

Value averaged_gradient(const Value& g, int64_t d, int64_t size) {
  const auto results = g.size(d);
  if (results == 0 || size % results) return resampled_gradient(g, d, size, adaptive_windows(size, results));
  auto sizes = g.sizes(), split = sizes, kept = all_dimensions(g.rank());
  sizes[static_cast<size_t>(d)] = size;
  split.insert(split.begin() + d + 1, size / results);
  for (auto i = static_cast<size_t>(d) + 1; i < kept.size(); i++) kept[i]++;
  return reshape(broadcast(g / (size / results), split, kept), sizes);
}

Lowering adaptive_average_pool(size_t spatial) {
  return [=](Call& call) {
    auto x = call.wide_value(0);
    const auto results = one_for_each(call.integers(1), spatial, 1);
    for (size_t i = 0; i < spatial; i++) x = averaged(x, x.rank() - static_cast<int64_t>(spatial - i), results[i]);
    call.give_rounded(x);
  };
}

Lowering adaptive_average_pool_gradient(size_t spatial) {
  return [=](Call& call) {
    auto g = call.wide_value(0);
    const auto sizes = call.tensor(1).sizes();
    for (size_t i = 0; i < spatial; i++) {
      const auto d = g.rank() - static_cast<int64_t>(spatial - i);
      g = averaged_gradient(g, d, sizes[static_cast<size_t>(d)]);
    }
    call.give_rounded(g);
  };
}

Lowering adaptive_max_pool(size_t spatial) {
  return [=](Call& call) {
    const auto x = call.value(0);
    const auto results = one_for_each(call.integers(1), spatial, 1);
    const auto divides = [](int64_t size, int64_t count) { return count > 0 && size % count == 0; };
    if (std::ranges::equal(std::span(x.sizes()).last(spatial), results, divides)) return give_largest_of_parts(call, x, spatial, results);
    const auto places = counted_places(x.sizes(), spatial);
    std::vector<Taps> windows;
    Sizes longest;
    for (size_t i = 0; i < spatial; i++) {
      windows.push_back(adaptive_windows(x.sizes()[x.sizes().size() - spatial + i], results[i]));
      longest.push_back(static_cast<int64_t>(windows.back().places.size()));
    }
    expect_few_places(longest);
    Largest found;
    for_each_place(longest, [&](const Sizes& at) {
      auto value = x, place = places;
      for (size_t i = 0; i < spatial; i++) {
        const auto from = hlo::constants(windows[i].places[static_cast<size_t>(at[i])], at::kLong);
        const auto d = x.rank() - static_cast<int64_t>(spatial - i);
        value = take(value, from, d);
        place = take(place, from, d);
      }
      found.take(value, place);
    });
    call.give({found.value, found.place});
  };
}

}  // namespace

void register_pooling() {
  for (const size_t spatial : {2, 3}) {
    const auto row = [&](const char* names, Lowering lower) { return Kernel{fmt::format(fmt::runtime(names), spatial), std::move(lower)}; };
    add_kernels({
        row("max_pool{}d_with_indices", max_pool(spatial)),
        row("max_pool{}d_with_indices_backward", max_pool_gradient(spatial, 7)),
        row("max_unpool{}d", max_unpool(spatial)),
        row("avg_pool{}d", average_pool(spatial)),
        row("avg_pool{}d_backward", average_pool_gradient(spatial)),
        row("_adaptive_avg_pool{0}d adaptive_avg_pool{0}d.out", adaptive_average_pool(spatial)),
        row("_adaptive_avg_pool{0}d_backward adaptive_avg_pool{0}d_backward.grad_input", adaptive_average_pool_gradient(spatial)),
        row("adaptive_max_pool{}d", adaptive_max_pool(spatial)),
        row("adaptive_max_pool{}d_backward", max_pool_gradient(spatial, 2)),
    });
  }
}

}  // namespace tessera::xla
