// Group: the control plane of a group of ranks, the same for every engine. Ranks agree before data moves, operations run in order and
// within their time limits, and all ranks get the same error.
#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/control/envelope.h"
#include "tessera/comm/control/link_family.h"
#include "tessera/comm/control/queue.h"
#include "tessera/comm/host/caller_threads.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/simulation.h"
#include "tessera/comm/transport.h"

namespace tessera {

/// The state that the communicators of one group share.
class Group {
 public:
  /// The ranks agree over the link, and the transport moves their data. Without a link this process runs as all ranks: there is nobody to
  /// agree with, and operations run in the thread that calls them. `number` is the same on all ranks of the group, and different from the
  /// numbers of this rank's other groups.
  explicit Group(std::unique_ptr<Transport> transport, std::shared_ptr<Link> link = nullptr,
                 std::shared_ptr<LinkFamily> family = std::make_shared<LinkFamily>(), uint64_t number = 0);
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();

 private:
  friend class Communicator;  // its methods are the operations of a group

  struct AtomicTraffic {
    std::atomic<uint64_t> calls = 0;
    std::atomic<uint64_t> bytes = 0;
    std::atomic<uint64_t> across = 0;
  };
  using Run = c10::function_ref<Moved(const Launch& start)>;
  /// An operation that is queued on a device.
  struct UnderWay {
    Event ready;
    Envelope envelope;
    std::chrono::milliseconds limit;
    Clock::time_point end;
  };

  const GroupTraits& traits() const { return transport_->traits(); }
  int rank() const { return link_->rank(); }
  int world_rank() const { return traits().world_ranks[rank()]; }

  /// Describes an operation of this rank: see envelope_for().
  Envelope describe(Operation operation, const Subject& subject, c10::function_ref<void(Envelope&)> fill = {}) const;
  /// Queues an operation: all ranks compare their envelopes and exchange the extremes of `known`, then `act` moves the data.
  template <class Act>
  Work start(const Envelope& envelope, std::chrono::milliseconds limit, Act act, std::optional<uint64_t> known = std::nullopt) {
    if (!link_) return run_here(envelope, act);
    if (auto* const simulation = Simulation::current()) return simulate(*simulation, envelope, limit, act, known);
    note_caller();
    return queue_.run([this, envelope, inputs = Event::record(traits().device), limit, act = std::move(act), known] {
      return run(envelope, inputs, limit, act, known);
    });
  }
  Work run_here(const Envelope& envelope, Run act);
  /// Runs the operation in the calling thread, as part of the simulation's queue of operations.
  Work simulate(Simulation& simulation, const Envelope& envelope, std::chrono::milliseconds limit, Run act, std::optional<uint64_t> known);
  void note_caller();
  Event run(Envelope envelope, Event inputs, std::chrono::milliseconds limit, Run act, std::optional<uint64_t> known = std::nullopt);
  void agree(const Envelope& envelope, std::optional<uint64_t> known, Clock::time_point deadline);
  Event run_agreed(const Envelope& envelope, const Launch& start, Run act);
  /// Ends the group if a device has not ended an operation in time. Returns whether any operation is under way on the device. The queue's
  /// thread calls it.
  bool watch_device();
  /// Tells the other ranks about the failure, and throws the operation's error.
  [[noreturn]] void fail(LinkFailure failure, const Envelope& envelope, std::chrono::milliseconds limit);
  void count(Operation operation, const Moved& moved);
  SharedAttempt share(const AreaShape& shape, const Subject& subject, std::chrono::milliseconds limit);

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<Link> link_;
  const std::shared_ptr<LinkFamily> family_;
  const uint64_t number_;
  CallerThreads callers_;
  std::atomic<int> meetings_ = 0;  // meet() calls that have not ended on this rank
  uint64_t sequence_ = 0;
  std::optional<Envelope> last_;     // the last operation that finished
  Envelope now_;                     // the current operation
  Extremes known_;                   // the extremes of the ranks' `known` for the current operation
  std::vector<Envelope> envelopes_;  // the envelopes of all ranks when these last differed
  std::exception_ptr broken_;        // the error that every later call throws
  std::deque<UnderWay> under_way_;

  mutable std::mutex mutex_;
  std::map<std::vector<int>, std::shared_ptr<Group>> parts_;  // the key has, for each rank, the first rank of its part
  std::array<AtomicTraffic, kOperations> counters_;
  std::atomic<uint64_t> last_number_ = 0;
  Queue queue_{[this] { return watch_device(); }};  // last, because its thread uses the members above
};

}  // namespace tessera
