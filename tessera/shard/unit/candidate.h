// Parameters that are about to become part of a unit: what they must be, and what becomes of the memory that they had.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <vector>

namespace tessera {

struct Candidate {
  std::string name;
  at::Tensor tensor;
  size_t index = 0;  // the caller's number for it
};

/// Throws UsageError, with the parameter's name, where one can't be sharded or two share memory.
void expect_shardable(std::span<const Candidate> candidates);

/// The values without gaps, in the order of dimensions in which they lie in memory.
at::Tensor dense(const at::Tensor& tensor);

/// The memory that candidates have before they become part of a unit. A tensor that looks into it afterwards would see old values for
/// ever; it gets an error when it is used.
class FormerMemory {
 public:
  explicit FormerMemory(std::span<const Candidate> candidates);
  FormerMemory(const FormerMemory&) = delete;
  FormerMemory& operator=(const FormerMemory&) = delete;
  ~FormerMemory();  // closes what others still have

  /// The candidates have other memory now.
  void abandon() { abandoned_ = true; }

 private:
  struct Place;
  std::vector<Place> places_;
  bool abandoned_ = false;
};

}  // namespace tessera
