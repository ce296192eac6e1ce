// Arguments that the operations of a group take, and counters of each kind of operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

class SharedArea;

enum class Reduce { Sum, Mean, Min, Max };

/// The subject of an operation. Ranks compare it, so that ranks which disagree get an error instead of each other's weights.
struct Subject {
  std::string_view unit = {};  // "layers.3", or another name of the caller's choice
  uint64_t number = 0;         // distinguishes units of the same name
  uint64_t version = 0;        // the version of the parameters that are moved
  uint64_t members = 0;        // a hash over which of the unit's parameters are moved
  /// Names whoever has written the parameters last, such as an optimizer with its options. Empty if unknown, which agrees with any writer.
  std::string_view writer = {};
};

/// The Subject::unit of tessera::recover. Ranks enter it from different points of their programs, so they may disagree.
inline constexpr std::string_view kRecovery = "tessera::recover";

/// One buffer of a unit, and the part of it that belongs to this rank. `own` may lie inside `whole`, but only at this rank's place.
struct Piece {
  at::Tensor whole;
  at::Tensor own;
  /// If set, a reduction stores the sum of squares of `own` here, which saves the caller another pass over memory. NaN if the reduction
  /// can't compute it in the same pass.
  std::shared_ptr<double> squares = {};
};

/// How the values of all ranks are reduced to one. Unset dtypes: values are sent in their own dtype, and added in that dtype, or in float32
/// if it is a narrower floating dtype. Where sums have no defined order (GroupTraits::sums), values are added in the dtype in which they
/// are sent.
struct Reduction {
  Reduce op = Reduce::Sum;
  std::optional<at::ScalarType> wire_dtype = {};
  std::optional<at::ScalarType> sum_dtype = {};
};

enum class Operation : uint8_t { AllGather, ReduceScatter, AllReduce, Broadcast, Barrier, Split, Share, Compare, Texts };
inline constexpr size_t kOperations = 9;
std::string_view name(Operation operation);
std::string_view name(Reduce op);

/// Which ranks share memory: all of a group, or on each host those of the host (in a group over two levels).
enum class Among { Group, Host };

/// A collective that moves tensors.
struct Request {
  Operation operation;
  /// all_reduce and broadcast have one piece, whose `own` and `whole` are the tensor that they change.
  c10::SmallVector<Piece, 2> pieces;
  Reduction reduction = {};
  int root = 0;  // the rank whose tensor a broadcast copies
  /// The other operands of the operator that needs a gathered unit. Only a tracing engine uses them: it makes the gather depend on them,
  /// and may replace them by equal values.
  std::span<at::Tensor> operands = {};
  /// For all_gather over two levels: if Host, the ranks of each host share the memory of `whole`, so one of them fills each part.
  Among whole_of = Among::Group;

  /// Whether `whole` has one part for each rank, and `own` is one such part: true for all_gather and reduce_scatter.
  bool has_parts() const { return operation == Operation::AllGather || operation == Operation::ReduceScatter; }
};

/// The cost of one kind of operation on this rank: how often it was called, how many bytes were sent to other ranks, and how many of these
/// to ranks on other hosts. If a backend's own collectives move the data, `across` is 0, because it is unknown.
struct Traffic {
  uint64_t calls = 0;
  uint64_t bytes = 0;
  uint64_t across = 0;
};

/// The smallest and the largest of some numbers; of none at first.
struct Extremes {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  uint64_t most = 0;

  static Extremes of(uint64_t number) { return {.least = number, .most = number}; }
  void add(const Extremes& other) {
    least = std::min(least, other.least);
    most = std::max(most, other.most);
  }
  /// Whether all the numbers are equal.
  bool are_one() const { return least >= most; }
};

/// The shape of memory that ranks see: parts, and counters of the ranks that see it.
struct AreaShape {
  size_t bytes_per_rank = 0;  // for each rank of the group, also for those that do not see the memory
  int counters = 0;
  Among among = Among::Group;
};

/// The result of sharing memory: every rank has it in `area`, or none has it, and `why_not` has the reason.
struct SharedAttempt {
  std::shared_ptr<SharedArea> area = nullptr;
  std::string why_not = {};
};

}  // namespace tessera
