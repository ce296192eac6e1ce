// Norms of layers, batches and groups.
#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

using hlo::wide;

/// The last dimensions, which are normalized together, and the dimensions before them.
struct Divided {
  Sizes together, rows;
  Divided(int64_t rank, const Sizes& normalized) {
    const auto first = rank - static_cast<int64_t>(normalized.size());
    for (int64_t i = 0; i < rank; i++) (i < first ? rows : together).push_back(i);
  }
};

/// Returns the gradient of the input, from the gradient `g` of the normalized values `normal`.
Value through_norm(const Value& g, const Value& normal, const Value& inverse, const Sizes& d) {
  const auto along = spread(mean_of(g, d), g, d) + normal * spread(mean_of(g * normal, d), g, d);
  return inverse * (g - along);
}

void layer_norm(Call& call) {
  const auto type = call.tensor(0).scalar_type();
  const auto x = call.value(0, wide(type));
  const auto d = Divided(x.rank(), call.integers(1)).together;
  const auto average = mean_of(x, d);
  const auto centred = x - spread(average, x, d);
  const auto variance = mean_of(centred * centred, d);
  const auto inverse = unary("rsqrt", variance + call.number(4));
  auto y = centred * spread(inverse, x, d);
  if (call.has(2)) y = y * expand(call.value(2, x.element()), x.sizes());
  if (call.has(3)) y = y + expand(call.value(3, x.element()), x.sizes());
  const auto kept = kept_sizes(x.sizes(), d);
  call.give({convert(y, type), reshape(average, kept), reshape(inverse, kept)});
}

void layer_norm_gradient(Call& call) {
  const auto type = call.tensor(1).scalar_type();
  const auto element = wide(type);
  const auto g = call.value(0, element), x = call.value(1, element);
  const auto [d, rows] = Divided(x.rank(), call.integers(2));
  const auto mean = expand(call.value(3, element), x.sizes()), inverse = expand(call.value(4, element), x.sizes());
  const auto normal = (x - mean) * inverse;
  const auto mask = call[7].toBoolList();
  std::vector<Value> results(3);
  if (mask[0]) {
    const auto scaled = call.has(5) ? g * expand(call.value(5, element), x.sizes()) : g;
    results[0] = convert(through_norm(scaled, normal, inverse, d), type);
  }
  if (mask[1] && call.has(5)) results[1] = convert(hlo::sum(g * normal, rows), call.tensor(5).scalar_type());
  if (mask[2] && call.has(6)) results[2] = convert(hlo::sum(g, rows), call.tensor(6).scalar_type());
  call.give(results);
}

Value by_channel(const Value& values, const Value& x) {
  return broadcast(values, x.sizes(), Sizes{1});
}

void update_running(const Call& call, size_t which, const Value& now, double momentum) {
  if (!call.has(which)) return;
  const auto before = call.value(which, now.element());
  write(call.tensor(which), before * hlo::full(1 - momentum, before.type()) + now * hlo::full(momentum, now.type()));
}

/// `training` is the index of the argument that says whether the batch's own mean and variance are used. Momentum and epsilon follow this
/// argument; the running mean and variance, if the operator has them, come before it.
Lowering batch_norm(size_t training) {
  return [=](Call& call) {
    const auto type = call.tensor(0).scalar_type();
    const auto x = call.value(0, wide(type));
    const bool has_running = training == 5, of_batch = call.flag(training);
    const double momentum = call.number(training + 1), epsilon = call.number(training + 2);
    Value mean, variance;
    if (of_batch) {
      const auto others = all_but(x.rank(), 1);
      mean = mean_of(x, others);
      const auto centred = x - by_channel(mean, x);
      variance = mean_of(centred * centred, others);
      if (has_running) {
        const auto count = static_cast<double>(count_of(x, others));
        update_running(call, 3, mean, momentum);
        update_running(call, 4, variance * (count / std::max(1.0, count - 1)), momentum);
      }
    } else {
      mean = call.value(3, x.element());
      variance = call.value(4, x.element());
    }
    const auto inverse = unary("rsqrt", variance + epsilon);
    auto y = (x - by_channel(mean, x)) * by_channel(inverse, x);
    if (call.has(1)) y = y * by_channel(call.value(1, x.element()), x);
    if (call.has(2)) y = y + by_channel(call.value(2, x.element()), x);
    const auto nothing = hlo::filled(0, {x.element(), {0}});
    call.give({convert(y, type), of_batch ? mean : nothing, of_batch ? inverse : nothing});
  };
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
    inverse = unary("rsqrt", variance + call.number(8));
  }
  const auto normal = (x - by_channel(mean, x)) * by_channel(inverse, x);
  const auto sum = hlo::sum(g, others), weighted = hlo::sum(g * normal, others);
  std::vector<Value> results(3);
  if (mask[0]) {
    auto dx = g;
    if (training) {
      const double count = static_cast<double>(c10::multiply_integers(x.sizes())) / static_cast<double>(x.size(1));
      const auto average = [&](const Value& of) { return by_channel(of / count, x); };
      dx = dx - average(sum) - normal * average(weighted);
    }
    dx = dx * by_channel(inverse, x);
    if (call.has(2)) dx = dx * by_channel(call.value(2, element), x);
    results[0] = convert(dx, type);
  }
  const auto parameter_type = call.has(2) ? call.tensor(2).scalar_type() : type;
  if (mask[1]) results[1] = convert(weighted, parameter_type);
  if (mask[2]) results[2] = convert(sum, parameter_type);
  call.give(results);
}

/// Computes with these dimensions: batch, group of channels, channel of the group, place.
void group_norm_gradient(Call& call) {
  const auto type = call.tensor(1).scalar_type();
  const auto element = wide(type);
  const auto batch = call.integer(5), channels = call.integer(6), places = call.integer(7), groups = call.integer(8);
  const Sizes split{batch, groups, channels / groups, places};
  const auto g = reshape(call.value(0, element), split), x = reshape(call.value(1, element), split);
  const auto of_group = [&](size_t i) { return broadcast(reshape(call.value(i, element), {batch, groups}), split, Sizes{0, 1}); };
  const auto inverse = of_group(3), normal = (x - of_group(2)) * inverse;
  const auto mask = call[9].toBoolList();
  std::vector<Value> results(3);
  if (mask[0]) {
    const auto scaled = call.has(4) ? g * broadcast(reshape(call.value(4, element), {groups, channels / groups}), split, Sizes{1, 2}) : g;
    results[0] = convert(reshape(through_norm(scaled, normal, inverse, {2, 3}), call.tensor(1).sizes()), type);
  }
  const auto parameter_type = call.has(4) ? call.tensor(4).scalar_type() : type;
  const auto by_channel = [&](const Value& all) { return convert(reshape(hlo::sum(all, {0, 3}), {channels}), parameter_type); };
  if (mask[1]) results[1] = by_channel(g * normal);
  if (mask[2]) results[2] = by_channel(g);
  call.give(results);
}

}  // namespace

void register_norms() {
  add_kernels({
      {"native_layer_norm", layer_norm},
      {"native_layer_norm_backward", layer_norm_gradient},
      {"native_batch_norm _native_batch_norm_legit", batch_norm(5)},
      {"_native_batch_norm_legit.no_stats", batch_norm(3)},
      {"native_batch_norm_backward", batch_norm_gradient},
      {"native_group_norm_backward", group_norm_gradient},
  });
}

}  // namespace tessera::xla
