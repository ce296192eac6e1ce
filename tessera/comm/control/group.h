// The control plane of a group, once for all engines: ranks agree before data moves, operations run in order and in time, and all ranks get
// the same error.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tessera/comm/control/envelope.h"
#include "tessera/comm/control/link_family.h"
#include "tessera/comm/control/queue.h"
#include "tessera/comm/host/caller_threads.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/transport.h"

namespace tessera {

/// The state that the communicators of one group share.
class Group {
 public:
  /// Ranks talk by the link, and the transport moves their data. Without a link this process stands for all ranks: there is nobody to agree
  /// with, and operations run in the thread that calls them.
  explicit Group(std::unique_ptr<Transport> transport, std::shared_ptr<Link> link = nullptr,
                 std::shared_ptr<LinkFamily> family = std::make_shared<LinkFamily>());
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();

  Work all_gather(std::span<const Piece> pieces, std::span<at::Tensor> operands, const Call& call);
  Work reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call);
  Work all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Call& call);
  Work broadcast(const at::Tensor& tensor, int root, const Call& call);
  Work barrier(const Call& call);
  /// A barrier that ranks may come to from any point of their programs: other operations of the group fail with a DisagreementError until
  /// all ranks are here.
  Work meet(const Call& call);
  /// The least and the most of the ranks' numbers.
  Extremes extremes(uint64_t own, const Call& call);
  /// The text of each rank, in rank order.
  std::vector<std::string> texts(const std::string& own, const Call& call);

  /// Ranks with equal colors form a new group, in the order of their ranks.
  std::shared_ptr<Group> split(std::span<const int> colors, const Call& call);
  /// Like split(), but equal divisions of the group have one group in common. Only the first call for a division is collective.
  std::shared_ptr<Group> part(std::span<const int> colors, const Call& call);
  /// The groups that part() has made.
  std::vector<std::shared_ptr<Group>> parts() const;

  /// Memory that all ranks of the group see, or why there is none.
  SharedAttempt share(const AreaShape& shape, const Call& call);

  /// Notes where the program is ("backward" of a unit), for reports about jobs that hang.
  void enter(std::string_view phase, std::string_view unit) { family_->recorder().enter(phase, unit); }
  /// Ends the group for good: its ranks get an error with this reason in every wait, current or later. The same holds for the group that
  /// it was split from and for all groups that were split from either, as far as this rank is a member of them.
  void abort(std::string_view reason) noexcept;

  const GroupTraits& traits() const { return transport_->traits(); }
  Transport& transport() { return *transport_; }

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
  using Run = std::function<Moved(const Launch& start)>;
  /// An operation that is queued on a device.
  struct UnderWay {
    Event ready;
    Envelope envelope;
    std::chrono::milliseconds limit;
    Clock::time_point end;
  };

  /// `number` is the same on all ranks of the group, and different from those of this rank's other groups.
  Group(std::unique_ptr<Transport> transport, std::shared_ptr<Link> link, std::shared_ptr<LinkFamily> family, uint64_t number);

  int rank() const { return link_->rank(); }
  int size() const { return traits().size; }
  int world_rank() const { return traits().world_ranks[static_cast<size_t>(rank())]; }

  /// Queues an operation: all ranks compare their envelopes, and exchange the extremes of `known`, then `run` does it. `fill` describes the
  /// operands.
  Work start(Operation operation, const Call& call, c10::function_ref<void(Envelope&)> fill, Run run,
             std::optional<uint64_t> known = std::nullopt);
  void note_caller();
  Event run(Envelope envelope, Event inputs, std::chrono::milliseconds limit, const Run& run, std::optional<uint64_t> known = std::nullopt);
  void agree(const Envelope& envelope, std::optional<uint64_t> known, Clock::time_point deadline);
  Event run_agreed(const Envelope& envelope, const Launch& start, const Run& run);
  /// Ends the group if a device has not ended an operation in time. Returns whether any is under way. For the queue's thread.
  bool watch_device();
  /// Throws what `failure` means for the operation, after telling the other ranks.
  [[noreturn]] void fail(LinkFailure failure, const Envelope& envelope, std::chrono::milliseconds limit);

  const std::shared_ptr<Transport> transport_;
  const std::shared_ptr<Link> link_;
  const std::shared_ptr<LinkFamily> family_;
  const uint64_t number_;
  CallerThreads callers_;
  std::atomic<int> meetings_ = 0;  // meet() calls that have not ended on this rank
  uint64_t sequence_ = 0;
  std::optional<Envelope> last_;     // the last operation that finished
  Envelope now_;                     // the current operation
  Extremes known_;                   // the extremes of the ranks' `known` for it
  std::vector<Envelope> envelopes_;  // of all ranks, if they differ
  std::exception_ptr broken_;        // what every later call throws
  std::deque<UnderWay> under_way_;

  mutable std::mutex mutex_;
  std::map<std::vector<int>, std::shared_ptr<Group>> parts_;  // by the first rank of each rank's part
  std::array<AtomicTraffic, kOperations> counters_;
  std::atomic<uint64_t> last_number_ = 0;
  Queue queue_{[this] { return watch_device(); }};  // last, because its thread uses the members above
};

}  // namespace tessera
