// The arithmetic of one reduction: chosen once, the same on every link.
#pragma once

#include <span>
#include <string>

#include "tessera/comm/host/envelope.h"
#include "tessera/comm/transport.h"

namespace tessera {

class Reducer {
 public:
  Reducer() = default;
  Reducer(const Reduction& reduction, at::ScalarType dtype);

  /// In what the numbers travel.
  at::ScalarType wire() const { return wire_; }
  /// Why numbers of this dtype can't be reduced like this, or nothing.
  std::string complaint(at::ScalarType dtype, std::span<const Piece> pieces = {}) const;
  /// One value from the contributions of all ranks, which are flat, in rank order. May be the memory of one of them. Adds the sum of the
  /// squares of the values to `squares`, if anybody wants to know, or NaN where that does not come about by the way.
  void reduce(std::span<const at::Tensor> contributions, const at::Tensor& target, double* squares = nullptr) const;
  /// The same for ranks on several hosts, in the order that Topology defines.
  void reduce(std::span<const at::Tensor> contributions, const at::Tensor& target, const Topology& topology, double* squares = nullptr) const;
  void describe(Envelope& envelope) const;

 private:
  int64_t divisor(size_t contributions) const;
  void combine(std::span<const at::Tensor> contributions, const at::Tensor& target, int64_t divisor, double* squares) const;

  Reduce op_ = Reduce::Sum;
  at::ScalarType wire_ = at::kFloat;
  at::ScalarType sum_ = at::kFloat;
};

}  // namespace tessera
