// Composes operators of other operators, because libtorch has the composed operators only as kernels for its own devices.
#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>

#include "tessera/xla/device/dimensions.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

void is_in(Call& call) {
  const auto given = [&](size_t i) { return call[i].isTensor() ? call.tensor(i) : at::native::wrapped_scalar_tensor(call[i].toScalar()); };
  const auto like = call.tensor(call[0].isTensor() ? 0 : 1).options().dtype(at::result_type(given(0), given(1)));
  const auto typed = [&](size_t i) {
    return call[i].isTensor() ? call.tensor(i).to(like.dtype()) : at::scalar_tensor(call[i].toScalar(), like);
  };
  const auto elements = typed(0), test = typed(1);
  const auto found = elements.unsqueeze(-1).eq(test.reshape({-1})).any(-1);
  call.give(read(call.flag(3) ? found.logical_not() : found));
}

void add_products(Call& call) {
  const auto sum = call.tensor(1).bmm(call.tensor(2)).sum(0);
  const auto factor = [&](size_t i) { return sum.is_floating_point() ? call[i].toScalar() : at::Scalar(call[i].toScalar().toLong()); };
  const auto scaled = sum.mul(factor(4));
  call.give(read(call.number(3) == 0 ? scaled : scaled.add(call.tensor(0).expand(sum.sizes()), factor(3))));
}

void cross_product(Call& call) {
  const auto d = call.integer(2);
  const auto a = call.tensor(0), b = call.tensor(1);
  call.give(read(a.roll(-1, d) * b.roll(-2, d) - a.roll(-2, d) * b.roll(-1, d)));
}

void renorm(Call& call) {
  const auto& x = call.tensor(0);
  auto others = all_dimensions(x.dim());
  others.erase(others.begin() + wrapped(call.integer(2), x.dim()));
  const auto norm = at::linalg_vector_norm(x, call[1].toScalar(), others, true);
  const auto limit = call[3].toScalar();
  call.give(read(x * at::where(norm > limit, (norm + 1e-7).reciprocal() * limit, at::ones_like(norm))));
}

void embedding_renorm(Call& call) {
  const auto& weight = call.tensor(0);
  const auto used =
      at::zeros({weight.size(0)}, weight.options().dtype(at::kBool)).index_fill(0, call.tensor(1).reshape({-1}), 1).unsqueeze(1);
  const auto norm = weight.norm(call.number(3), 1, true);
  const double limit = call.number(2);
  call.give(read(at::where(used.logical_and(norm > limit), weight * (limit / (norm + 1e-7)), weight)));
}

// --- distances ---

/// The p-norm over the last dimension.
at::Tensor distance(const at::Tensor& difference, double p) {
  return at::linalg_vector_norm(difference, p, at::IntArrayRef{-1});
}

/// The derivative of the p-norm `norm` of `difference` with respect to `difference`.
at::Tensor distance_slope(const at::Tensor& difference, double p, const at::Tensor& norm) {
  const auto size = difference.abs();
  const auto zero = at::zeros_like(difference);
  if (p == 0) return zero;
  if (p == 1) return difference.sign();
  if (std::isinf(p)) return difference.sign() * size.eq(norm);
  const auto powers = p == 2 ? difference : difference.sign() * size.pow(p - 1);
  return at::where(norm.eq(0).logical_or(difference.eq(0)), zero, powers / norm.pow(p - 1));
}

at::Tensor differences(const Call& call, size_t first) {
  return call.tensor(first).unsqueeze(-2) - call.tensor(first + 1).unsqueeze(-3);
}

void distances(Call& call) {
  call.give(read(distance(differences(call, 0), call.number(2))));
}

void distances_gradient(Call& call) {
  const auto slope = distance_slope(differences(call, 1), call.number(3), call.tensor(4).unsqueeze(-1));
  call.give(read((slope * call.tensor(0).unsqueeze(-1)).sum(-2)));
}

struct Pairs {
  at::Tensor first, second;
};
Pairs all_pairs(const at::Tensor& x) {
  const auto places = at::triu_indices(x.size(0), x.size(0), 1, x.options().dtype(at::kLong));
  return {places[0], places[1]};
}

void pair_distances(Call& call) {
  const auto& x = call.tensor(0);
  const auto [a, b] = all_pairs(x);
  call.give(read(distance(x.index_select(0, a) - x.index_select(0, b), call.number(1))));
}

void pair_distances_gradient(Call& call) {
  const auto& x = call.tensor(1);
  const auto [a, b] = all_pairs(x);
  const auto slope = distance_slope(x.index_select(0, a) - x.index_select(0, b), call.number(2), call.tensor(3).unsqueeze(-1));
  const auto each = slope * call.tensor(0).unsqueeze(-1);
  call.give(read(at::zeros_like(x).index_add(0, a, each).index_add(0, b, each, -1)));
}

// --- loss scaling ---

/// Multiplies gradients by the inverse of their scale, and sets `found` to 1 if an element was infinite or NaN.
void unscale(const at::TensorList gradients, at::Tensor& found, const at::Tensor& inverse) {
  for (const auto& gradient : gradients) {
    found.copy_(at::maximum(found, gradient.isfinite().all().logical_not().to(found.scalar_type())));
    gradient.mul_(inverse);
  }
}

at::Tensor& update_scale(at::Tensor& scale, at::Tensor& tracker, const at::Tensor& found, double growth, double backoff, int64_t interval) {
  const auto bad = found.to(at::kBool);
  const auto steps = tracker + 1;
  const auto grows = steps.eq(interval);
  const auto grown = scale * growth;
  scale.copy_(at::where(bad, scale * backoff, at::where(grows.logical_and(grown.isfinite()), grown, scale)));
  tracker.copy_(at::where(bad.logical_or(grows), at::zeros_like(tracker), steps));
  return scale;
}

}  // namespace

void register_compositions() {
  add_kernels({
      {"isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor", is_in},
      {"addbmm", add_products},
      {"linalg_cross", cross_product},
      {"renorm", renorm},
      {"embedding_renorm_", embedding_renorm},
      {"_cdist_forward", distances},
      {"_cdist_backward", distances_gradient},
      {"_pdist_forward", pair_distances},
      {"_pdist_backward", pair_distances_gradient},
  });
  auto& aten = library_of("aten", c10::DispatchKey::PrivateUse1);
  aten.impl("_amp_foreach_non_finite_check_and_unscale_", &unscale);
  aten.impl("_amp_update_scale_", &update_scale);
}

}  // namespace tessera::xla
