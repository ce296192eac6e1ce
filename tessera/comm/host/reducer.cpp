#include "tessera/comm/host/reducer.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <limits>

#include "tessera/comm/host/add_rows.h"

namespace tessera {
namespace {

/// Whether values of this dtype have a mean of the same dtype.
bool has_mean(at::ScalarType dtype) {
  return at::isFloatingType(dtype) || at::isComplexType(dtype);
}

/// The dtype in which values are added if the caller sets none: at least float32 for floating values.
at::ScalarType default_sum_dtype(at::ScalarType dtype) {
  return at::isFloatingType(dtype) && c10::elementSize(dtype) < 4 ? at::kFloat : dtype;
}

}  // namespace

Reducer::Reducer(const Reduction& reduction, at::ScalarType dtype)
    : op_(reduction.op),
      wire_(reduction.wire_dtype.value_or(dtype)),
      sum_(reduction.sum_dtype.value_or(default_sum_dtype(wire_ == dtype ? dtype : at::promoteTypes(dtype, default_sum_dtype(wire_))))) {}

std::string Reducer::complaint(at::ScalarType dtype, std::span<const Piece> pieces) const {
  for (const auto& piece : pieces) {
    if (has_mean(piece.own.scalar_type()) != has_mean(dtype)) {
      return fmt::format("own is {}, whole is {}", c10::toString(piece.own.scalar_type()), c10::toString(dtype));
    }
  }
  const bool floating = at::isFloatingType(dtype) && at::isFloatingType(wire_) && at::isFloatingType(sum_);
  const bool complex = at::isComplexType(dtype) && wire_ == dtype && sum_ == dtype && (op_ == Reduce::Sum || op_ == Reduce::Mean);
  const bool integral = at::isIntegralType(dtype, /*includeBool=*/false) && wire_ == dtype && sum_ == dtype;
  if (!floating && !complex && !integral) {
    return fmt::format(
        "can't reduce {} sent as {} and added in {}; all three must be floating, or one and the same integer type, or complex type for "
        "sums and means",
        c10::toString(dtype), c10::toString(wire_), c10::toString(sum_));
  }
  if (integral && op_ == Reduce::Mean) return fmt::format("the mean of {} is not a whole number; use sum", c10::toString(dtype));
  return {};
}

void Reducer::reduce(std::span<const at::Tensor> contributions, const at::Tensor& target, const Topology& topology, double* squares) const {
  if (topology.hosts() == 1) return reduce(contributions, target, squares);
  c10::SmallVector<at::Tensor, 8> sums;
  for (int host = 0; host < topology.hosts(); host++) {
    c10::SmallVector<at::Tensor, 8> on_host;
    for (const int rank : topology.ranks_on(host)) on_host.push_back(contributions[static_cast<size_t>(rank)]);
    sums.push_back(at::empty(target.sizes(), target.options().dtype(sum_)));
    combine(on_host, sums.back(), 1, nullptr);
  }
  combine(sums, target, divisor(contributions.size()), squares);
}

void Reducer::reduce(std::span<const at::Tensor> contributions, const at::Tensor& target, double* squares) const {
  combine(contributions, target, divisor(contributions.size()), squares);
}

int64_t Reducer::divisor(size_t contributions) const {
  return op_ == Reduce::Mean ? static_cast<int64_t>(contributions) : 1;
}

/// Adds in the order of the contributions.
void Reducer::combine(std::span<const at::Tensor> contributions, const at::Tensor& target, int64_t divisor, double* squares) const {
  const bool adds = op_ == Reduce::Sum || op_ == Reduce::Mean;
  if (adds && sum_ == at::kFloat && target.scalar_type() == at::kFloat) {
    if (add_rows(contributions, target, static_cast<float>(divisor), squares)) return;
  }
  auto result = contributions.front().to(sum_, /*non_blocking=*/false, /*copy=*/true);
  for (const auto& next : contributions.subspan(1)) {
    const auto value = next.to(sum_);
    if (op_ == Reduce::Min) {
      at::minimum_out(result, result, value);
    } else if (op_ == Reduce::Max) {
      at::maximum_out(result, result, value);
    } else {
      result.add_(value);
    }
  }
  if (divisor != 1) result.div_(divisor);
  target.copy_(result.view_as(target));
  if (squares != nullptr) *squares = std::numeric_limits<double>::quiet_NaN();
}

void Reducer::describe(Envelope& envelope) const {
  envelope.reduce = static_cast<uint8_t>(op_);
  envelope.wire_dtype = static_cast<int8_t>(wire_);
  envelope.sum_dtype = static_cast<int8_t>(sum_);
}

}  // namespace tessera
