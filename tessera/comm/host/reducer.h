// The arithmetic of a reduction. It is the same on every link.
#pragma once

#include <span>

#include "tessera/comm/host/link.h"
#include "tessera/comm/operation.h"

namespace tessera {

/// Returns the reduction of these values with both dtypes set, as engines need it.
Reduction resolved(Reduction reduction, const at::Tensor& values);
/// Throws UsageError if values of this dtype can't be reduced like this. The reduction must be resolved.
void expect_reducible(const Reduction& reduction, at::ScalarType dtype, std::span<const Piece> pieces = {});

class Reducer {
 public:
  explicit Reducer(const Reduction& resolved) : op_(resolved.op), wire_(*resolved.wire_dtype), sum_(*resolved.sum_dtype) {}

  /// Reduces the contributions of all ranks into `target`, which may be one of them. They are in rank order, and in the dtype in which they
  /// were sent. Adds in the order that Topology defines. If `squares` is given, adds the sum of squares of `target` to it, or sets it to
  /// NaN if that would take another pass over memory.
  void reduce(std::span<const ConstBytes> contributions, const at::Tensor& target, const Topology& topology,
              double* squares = nullptr) const;

  /// The two steps of reduce() for ranks on several hosts. First, on each host: reduces what its ranks sent to a sum in sum_dtype.
  void reduce_host(std::span<const ConstBytes> rows, const at::Tensor& sum) const { combine(rows, wire_, sum, 1, nullptr); }
  /// Then reduces the sums of all hosts, in host order.
  void reduce_hosts(std::span<const ConstBytes> sums, const at::Tensor& target, int ranks, double* squares) const {
    combine(sums, sum_, target, divisor(ranks), squares);
  }

 private:
  int64_t divisor(int64_t ranks) const { return op_ == Reduce::Mean ? ranks : 1; }
  void combine(std::span<const ConstBytes> rows, at::ScalarType dtype, const at::Tensor& target, int64_t divisor, double* squares) const;

  Reduce op_ = Reduce::Sum;
  at::ScalarType wire_ = at::kFloat;
  at::ScalarType sum_ = at::kFloat;
};

}  // namespace tessera
