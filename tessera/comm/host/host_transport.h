// Collectives over any Link: agreement before data moves, sums in a fixed order, an ordered queue, errors that name ranks.
#pragma once

#include <atomic>
#include <functional>
#include <optional>

#include "tessera/comm/host/caller_threads.h"
#include "tessera/comm/host/envelope.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/host/link_family.h"
#include "tessera/comm/host/queue.h"
#include "tessera/comm/host/reducer.h"
#include "tessera/comm/transport.h"

namespace tessera {

class HostTransport final : public Transport {
 public:
  /// Size and rank come from the link.
  HostTransport(Traits traits, std::unique_ptr<Link> link, std::shared_ptr<LinkFamily> family = std::make_shared<LinkFamily>());
  ~HostTransport() override;

  Work all_gather(std::span<const Piece> pieces, std::span<at::Tensor> companions, const Call& call) override;
  Work reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call) override;
  Work all_reduce(at::Tensor tensor, const Reduction& reduction, const Call& call) override;
  Work broadcast(at::Tensor tensor, int root, const Call& call) override;
  Work barrier(const Call& call) override;
  Work meet(const Call& call) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, const Call& call) override;
  SharedAttempt share(const AreaShape& shape, const Call& call) override;
  void enter(std::string_view phase, std::string_view unit) override { family_->recorder().enter(phase, unit); }
  void abort(std::string_view reason) noexcept override;

 private:
  /// `number` is the same on all ranks of the group, and different from those of this rank's other groups.
  HostTransport(Traits traits, std::shared_ptr<Link> link, std::shared_ptr<LinkFamily> family, uint64_t number);

  int rank() const { return link_->rank(); }
  int size() const { return link_->size(); }
  int world_rank() const { return traits().world_ranks[static_cast<size_t>(rank())]; }

  /// Queues an operation: all ranks compare envelopes, then `move` moves the data and returns how many bytes it sent.
  using Move = std::function<uint64_t(Clock::time_point deadline)>;
  Work start(Envelope envelope, std::chrono::milliseconds limit, Move move);
  void note_caller();
  void run(Envelope envelope, std::chrono::milliseconds limit, const Move& move);
  void agree(const Envelope& envelope, Clock::time_point deadline);
  void run_agreed(const Envelope& envelope, Clock::time_point deadline, const Move& move);
  uint64_t gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline);
  /// Reduces what all ranks send to this one into `own`, and returns how many bytes it sent. Adds the squares of `own` to `squares`, if
  /// given.
  uint64_t reduce(const Reducer& reducer, std::span<const ConstBytes> to, const at::Tensor& own, Clock::time_point deadline,
                  double* squares = nullptr);
  uint64_t sent_to_others(std::span<const ConstBytes> to) const;
  /// Throws what `failure` means for the operation, after telling the other ranks.
  [[noreturn]] void fail(const LinkFailure& failure, const Envelope& envelope, std::chrono::milliseconds limit);

  std::shared_ptr<Link> link_;
  std::shared_ptr<LinkFamily> family_;
  const uint64_t number_;
  CallerThreads callers_;
  std::atomic<int> meetings_ = 0;  // in which this rank is
  uint64_t sequence_ = 0;
  std::optional<Envelope> last_;     // the last operation that finished
  Envelope now_;                     // the current operation
  std::exception_ptr broken_;        // what every later call throws
  std::vector<Envelope> envelopes_;  // of all ranks; reused by every operation
  std::vector<Bytes> envelope_bytes_;
  Queue queue_;  // last, because its thread uses the members above
};

/// A HostTransport over the link. `traits` needs no size and no ranks, which come from the link.
std::shared_ptr<Transport> host_transport(Transport::Traits traits, std::unique_ptr<Link> link,
                                          std::shared_ptr<LinkFamily> family = std::make_shared<LinkFamily>());

}  // namespace tessera
