#include "tessera/comm/host/reducer.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <limits>

#include "tessera/base/error.h"
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

Reduction resolved(Reduction reduction, const at::Tensor& values) {
  if (!values.defined()) return reduction;
  const auto dtype = values.scalar_type(), wire = reduction.wire_dtype.value_or(dtype);
  reduction.wire_dtype = wire;
  if (!reduction.sum_dtype) {
    reduction.sum_dtype = default_sum_dtype(wire == dtype ? dtype : at::promoteTypes(dtype, default_sum_dtype(wire)));
  }
  return reduction;
}

void expect_reducible(const Reduction& reduction, at::ScalarType dtype, std::span<const Piece> pieces) {
  const auto op = reduction.op;
  const auto wire = *reduction.wire_dtype, sum = *reduction.sum_dtype;
  for (const auto& piece : pieces) {
    if (has_mean(piece.own.scalar_type()) != has_mean(dtype)) {
      throw UsageError("own is {}, but whole is {}; both must be floating or complex, or neither", c10::toString(piece.own.scalar_type()),
                       c10::toString(dtype));
    }
  }
  const bool floating = at::isFloatingType(dtype) && at::isFloatingType(wire) && at::isFloatingType(sum);
  const bool complex = at::isComplexType(dtype) && wire == dtype && sum == dtype && (op == Reduce::Sum || op == Reduce::Mean);
  const bool integral = at::isIntegralType(dtype, /*includeBool=*/false) && wire == dtype && sum == dtype;
  if (!floating && !complex && !integral) {
    throw UsageError(
        "can't reduce {} sent as {} and added in {}; all three must be floating, or the same integer type, or (for sums and means) "
        "the same complex type",
        c10::toString(dtype), c10::toString(wire), c10::toString(sum));
  }
  if (integral && op == Reduce::Mean) {
    throw UsageError("the mean of {} is not a whole number; use sum", c10::toString(dtype));
  }
}

void Reducer::reduce(std::span<const ConstBytes> contributions, const at::Tensor& target, const Topology& topology, double* squares) const {
  const auto ranks = static_cast<int>(contributions.size());
  if (topology.hosts() == 1) return combine(contributions, wire_, target, divisor(ranks), squares);
  c10::SmallVector<at::Tensor, 8> sums;
  c10::SmallVector<ConstBytes, 8> rows, on_host;
  for (int host = 0; host < topology.hosts(); host++) {
    on_host.clear();
    for (const int rank : topology.ranks_on(host)) on_host.push_back(contributions[rank]);
    const auto& sum = sums.emplace_back(at::empty({target.numel()}, target.options().dtype(sum_)));
    reduce_host(on_host, sum);
    rows.emplace_back(static_cast<const std::byte*>(sum.const_data_ptr()), sum.nbytes());
  }
  reduce_hosts(rows, target, ranks, squares);
}

/// Reduces the rows in their order.
void Reducer::combine(std::span<const ConstBytes> rows, at::ScalarType dtype, const at::Tensor& target, int64_t divisor,
                      double* squares) const {
  const bool adds = op_ == Reduce::Sum || op_ == Reduce::Mean;
  if (adds && sum_ == at::kFloat && target.scalar_type() == at::kFloat) {
    if (add_rows(rows, dtype, target, static_cast<float>(divisor), squares)) return;
  }
  const auto values = [&](ConstBytes row) {
    return at::from_blob(const_cast<std::byte*>(row.data()), {target.numel()}, at::TensorOptions().dtype(dtype));
  };
  auto result = values(rows.front()).to(sum_, /*non_blocking=*/false, /*copy=*/true);
  for (const auto& row : rows.subspan(1)) {
    const auto value = values(row).to(sum_);
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

}  // namespace tessera
