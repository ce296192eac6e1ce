// The interface that an engine implements so that ranks can run collectives. Callers use Communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
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

/// What an operation is about. It travels in the envelope, so that ranks which disagree get an error instead of each other's weights.
struct Subject {
  std::string_view unit = {};  // "layers.3", or another name of the caller's choice
  uint64_t number = 0;         // distinguishes units of the same name
  uint64_t version = 0;        // of the parameters that are moved
  uint64_t members = 0;        // a hash over which of the unit's parameters are moved
  /// What has written the parameters last, with its options; empty if it is not known, which fits everything.
  std::string_view writer = {};
};

/// The unit that tessera::recover names: ranks enter it from different points of their programs, so disagreement is no fault there.
inline constexpr std::string_view kRecovery = "tessera::recover";

/// One buffer of a unit, and the part of it that belongs to this rank. `own` may lie inside `whole`, but only at this rank's place.
struct Piece {
  at::Tensor whole;
  at::Tensor own;
  /// If set, a reduction stores the sum of squares of `own` here, which saves the caller another pass over memory. NaN if the reduction
  /// can't compute it in the same pass.
  std::shared_ptr<double> squares = {};
};

/// How the values of all ranks become one. Unset dtypes: values are sent in their own dtype, and added in that dtype, but at least in
/// float32.
struct Reduction {
  Reduce op = Reduce::Sum;
  std::optional<at::ScalarType> wire_dtype = {};
  std::optional<at::ScalarType> sum_dtype = {};
};

/// How an engine prefers the parameters of a unit to be packed.
enum class Packing { OneBuffer, BufferPerParameter };

enum class Operation : uint8_t { AllGather, ReduceScatter, AllReduce, Broadcast, Barrier, Split, Share };
inline constexpr size_t kOperations = 7;
std::string_view name(Operation operation);
std::string_view name(Reduce op);

/// What one kind of operation has cost this rank. `bytes` were sent to other ranks.
struct Traffic {
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

/// The arguments that all operations have.
struct Call {
  Subject subject = {};
  std::chrono::milliseconds limit{};
};

/// The shape of memory that all ranks of a group see: a part for each rank, and counters.
struct AreaShape {
  size_t bytes_per_rank = 0;
  int counters = 0;
};

/// Shared memory on every rank; or on none, and then `area` is null and `why_not` has the reason.
struct SharedAttempt {
  std::shared_ptr<SharedArea> area;
  std::string why_not;
};

/// Implemented once per engine. Every rank calls the same operations in the same order. A size of one is no special case.
class Transport {
 public:
  struct Traits {
    std::string name;
    bool simulated = false;  // the other ranks do not exist
    int size = 1;
    Topology topology = Topology::one_host(1);  // of all `size` ranks
    std::vector<int> local_ranks = {0};         // the ranks that this process's tensors stand for; a tracing engine has them all
    std::vector<int> world_ranks = {};          // of each rank, its number in the world from which the group was split; unset if the same
    at::Device device = at::kCPU;               // where tensors must be
    Packing packing = Packing::OneBuffer;
    bool traces = false;  // operations are recorded and not run, so there is nothing to prefetch
  };

  explicit Transport(Traits traits);
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport();

  /// `companions`: the other operands of the operator that needs the unit. Only a tracing engine uses them: it makes the gather depend on
  /// them, and may replace them by equal values.
  virtual Work all_gather(std::span<const Piece> pieces, std::span<at::Tensor> companions, const Call& call) = 0;
  /// Adds in the order that Topology defines, so that the same run gives the same bits.
  virtual Work reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call) = 0;
  virtual Work all_reduce(at::Tensor tensor, const Reduction& reduction, const Call& call) = 0;
  virtual Work broadcast(at::Tensor tensor, int root, const Call& call) = 0;
  virtual Work barrier(const Call& call) = 0;
  /// A barrier to which ranks come from different points of their programs: what other ranks do in the group meanwhile fails there with a
  /// DisagreementError, until all are here. Engines that can't get out of step have nothing to do for it.
  virtual Work meet(const Call& call) { return barrier(call); }

  /// Ranks with equal numbers in `colors` (one per rank, the same list on every rank) form a new group, in the order of their ranks.
  virtual std::unique_ptr<Transport> split(std::span<const int> colors, const Call& call) = 0;
  /// The same, but equal divisions of the group have one group in common. Only the first call for a division is collective.
  std::shared_ptr<Transport> part(std::span<const int> colors, const Call& call);
  /// The groups that part() has made.
  std::vector<std::shared_ptr<Transport>> parts() const;

  /// Collective, with the same shape on every rank: memory that all ranks of the group see, or why there is none.
  virtual SharedAttempt share(const AreaShape& shape, const Call& call);

  /// The value that each local rank sees; from_replicas is the inverse. One value on engines with one rank per process.
  virtual std::vector<at::Tensor> replicas(const at::Tensor& tensor) { return {tensor}; }
  virtual at::Tensor from_replicas(std::span<const at::Tensor> tensors) { return tensors.front(); }

  /// Notes where the program is ("backward" of a unit), for reports about jobs that hang.
  virtual void enter(std::string_view /*phase*/, std::string_view /*unit*/) {}

  /// Marks the end of a training step, where a tracing engine ends its program.
  virtual void step_done() {}

  /// Ends the group for good: its ranks get an error with this reason in every wait, current or later. The same holds for the group that
  /// it was split from and for all groups that were split from either, as far as this rank is a member of them.
  virtual void abort(std::string_view reason) noexcept = 0;

  const Traits& traits() const { return traits_; }

  void count(Operation operation, uint64_t bytes);
  Traffic traffic(Operation operation) const;
  void reset_traffic();

  /// 1, 2, 3...: numbers for objects that all ranks create in the same order.
  uint64_t next_number() { return ++last_number_; }

 private:
  struct AtomicTraffic {
    std::atomic<uint64_t> calls = 0;
    std::atomic<uint64_t> bytes = 0;
  };

  const Traits traits_;
  mutable std::mutex mutex_;
  std::map<std::vector<int>, std::shared_ptr<Transport>> parts_;  // by the first rank of each rank's part
  std::array<AtomicTraffic, kOperations> counters_;
  std::atomic<uint64_t> last_number_ = 0;
};

}  // namespace tessera
