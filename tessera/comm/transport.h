// What an engine must offer so that ranks can talk. Callers use Communicator; an engine lives in a folder of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/topology.h"
#include "tessera/comm/work.h"

namespace tessera {

class SharedArea;

enum class Reduce { Sum, Mean, Min, Max };

/// What an operation is about. It travels with the data, so that ranks which disagree get an error instead of each other's weights.
struct Subject {
  std::string_view unit = {};  // "layers.3", or what the caller calls itself
  uint64_t number = 0;         // tells it from others of that name
  uint64_t version = 0;        // of the parameters that move
  uint64_t members = 0;        // a hash over which of its parameters move
};

/// One buffer of a unit, whole, and the part of it that belongs to this rank. The part may lie at its own place inside the whole.
struct Piece {
  at::Tensor whole;
  at::Tensor own;
  /// Where a reduction shall put the sum of the squares of what it writes to `own`, for those who would have to read it all again: NaN
  /// where that does not come about by the way.
  std::shared_ptr<double> squares = {};
};

/// How numbers of several ranks become one. Unset dtypes: travel as they are, add in at least float32.
struct Reduction {
  Reduce op = Reduce::Sum;
  std::optional<at::ScalarType> wire_dtype = {};
  std::optional<at::ScalarType> sum_dtype = {};
};

/// How an engine prefers the parameters of a unit to lie.
enum class Packing { OneBuffer, BufferPerParameter };

enum class Operation : uint8_t { AllGather, ReduceScatter, AllReduce, Broadcast, Barrier, Split, Share };
inline constexpr size_t kOperations = 7;
std::string_view name(Operation operation);
std::string_view name(Reduce op);

/// What one kind of operation cost this rank. Bytes are those that it sent to other ranks.
struct Traffic {
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

/// What every call carries besides its buffers.
struct Call {
  Subject subject = {};
  std::chrono::milliseconds limit{};
};

/// The shape of memory that all ranks of a group see: so much for each rank, and so many counters.
struct AreaShape {
  size_t bytes_per_rank = 0;
  int counters = 0;
};

/// Such memory on every rank, or on none, with the reason.
struct SharedAttempt {
  std::shared_ptr<SharedArea> area;
  std::string why_not;
};

/// Implemented once per engine. Every rank calls the same operations in the same order. A size of one is an ordinary case.
class Transport {
 public:
  struct Traits {
    std::string name;
    bool simulated = false;  // the other ranks do not exist
    int size = 1;
    Topology topology = Topology::one_host(1);  // of as many ranks as there are
    std::vector<int> local_ranks = {0};  // the ranks that this process's tensors stand for; a tracing engine has them all
    at::Device device = at::kCPU;        // where tensors must be
    Packing packing = Packing::OneBuffer;
    bool traces = false;  // operations are recorded, not run: prefetching means nothing
  };

  explicit Transport(Traits traits);
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport();

  /// `companions`: the other operands of the operator that needs the unit. Only a tracing engine uses them: it ties the gather to
  /// them, and may put equal values in their place.
  virtual Work all_gather(std::span<const Piece> pieces, std::span<at::Tensor> companions, const Call& call) = 0;
  /// Adds in rank order, so that the same run gives the same bits.
  virtual Work reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call) = 0;
  virtual Work all_reduce(at::Tensor tensor, const Reduction& reduction, const Call& call) = 0;
  virtual Work broadcast(at::Tensor tensor, int root, const Call& call) = 0;
  virtual Work barrier(const Call& call) = 0;

  /// Ranks with equal numbers in `colors` (one per rank, the same list everywhere) form a group of their own, in today's order.
  virtual std::unique_ptr<Transport> split(std::span<const int> colors, const Call& call) = 0;

  /// Memory that all ranks of the group see, or why there is none. All ranks call it at once, with the same shape.
  virtual SharedAttempt share(const AreaShape& shape, const Call& call);

  /// The value that each local rank sees, and back. One value on engines with one rank per process.
  virtual std::vector<at::Tensor> replicas(const at::Tensor& tensor) { return {tensor}; }
  virtual at::Tensor from_replicas(std::span<const at::Tensor> tensors) { return tensors.front(); }

  /// A training step is over: where a tracing engine cuts its program.
  virtual void step_done() {}

  /// Gives up for good: all ranks of the group, of the group that it was split from and of all that were split from either, get an
  /// error with this reason where they wait or will wait. (As far as they share a group with this rank.)
  virtual void abort(std::string_view reason) noexcept = 0;

  const Traits& traits() const { return traits_; }

  void count(Operation operation, uint64_t bytes);
  Traffic traffic(Operation operation) const;
  void reset_traffic();

  /// 1, 2, 3...: names for what all ranks make in the same order.
  uint64_t next_number() { return ++last_number_; }

 private:
  struct AtomicTraffic {
    std::atomic<uint64_t> calls = 0;
    std::atomic<uint64_t> bytes = 0;
  };

  const Traits traits_;
  std::array<AtomicTraffic, kOperations> counters_;
  std::atomic<uint64_t> last_number_ = 0;
};

}  // namespace tessera
