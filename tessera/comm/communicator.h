// Collectives among the ranks of a group. Every rank calls the same operations in the same order; one that does not is told so by name.
#pragma once

#include "tessera/comm/transport.h"

namespace tessera {

inline constexpr std::chrono::milliseconds kStartLimit = std::chrono::minutes(5);
inline constexpr std::chrono::milliseconds kOperationLimit = std::chrono::minutes(10);

/// A rank's membership in a group: a value, cheap to copy; the copies share one queue, in which operations run in the order of their
/// calls. When ranks disagree about an operation, all of them get the same CommError and may go on. When a rank is late or gone,
/// all get an error that names it, and the group is done for: every later call repeats that error.
class Communicator {
 public:
  explicit Communicator(std::shared_ptr<Transport> transport, std::chrono::milliseconds limit = kOperationLimit);

  /// The rank of this process. Throws UsageError where one process stands for several or records a program for all (see local_ranks).
  int rank() const;
  int size() const { return transport_->traits().size; }
  /// Which ranks share a host.
  const Topology& topology() const { return traits().topology; }
  const std::vector<int>& local_ranks() const { return transport_->traits().local_ranks; }
  /// Whether this process stands for rank 0: the one that prints, and writes what is needed once.
  bool is_first() const { return local_ranks().front() == 0; }
  bool same_group(const Communicator& other) const { return transport_ == other.transport_; }
  /// The same for all copies of a communicator, and no other's while one of them lives.
  const void* id() const { return transport_.get(); }
  /// Name of the transport, its device, its favourite layout, and whether it only records.
  const Transport::Traits& traits() const { return transport_->traits(); }

  /// How long an operation may wait for other ranks. The copy that with_limit returns speaks for the same group.
  std::chrono::milliseconds limit() const { return limit_; }
  Communicator with_limit(std::chrono::milliseconds limit) const { return Communicator(transport_, limit); }

  /// Each whole becomes the own parts of all ranks, in rank order. Any dtype; whole.numel() == size() * own.numel().
  Work all_gather(std::span<const Piece> pieces, Subject subject = {}, std::span<at::Tensor> companions = {}) const;
  /// Each own part becomes that part of the wholes of all ranks, reduced in rank order. The wholes are left as they are.
  Work reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction = {}, Subject subject = {}) const;
  /// In place.
  Work all_reduce(at::Tensor tensor, const Reduction& reduction = {}, Subject subject = {}) const;
  /// The tensor of rank `root` goes to all others.
  Work broadcast(at::Tensor tensor, int root = 0, Subject subject = {}) const;
  /// Returns when every rank has come to it.
  void barrier(Subject subject = {}) const;

  /// Ranks with equal colors form a group of their own, in today's order. One color per rank, the same list on every rank.
  Communicator split(std::span<const int> colors) const;

  /// The same ranks as a group of their own: what happens in it needs no order with what happens in this one. For each thread that works
  /// on its own, on every rank.
  Communicator duplicate() const;

  /// Memory that all ranks of the group see, or why there is none. All call it at once, with the same shape.
  SharedAttempt share(const AreaShape& shape, Subject subject = {}) const;

  /// The part of a flat tensor, known whole to every rank, that belongs here: chunk r of size() equal ones, the last filled with zeros.
  at::Tensor own_chunk(const at::Tensor& flat) const;
  /// The value that each of local_ranks() sees, and back.
  std::vector<at::Tensor> replicas(const at::Tensor& tensor) const { return transport_->replicas(tensor); }
  at::Tensor from_replicas(std::span<const at::Tensor> tensors) const { return transport_->from_replicas(tensors); }

  void step_done() const { transport_->step_done(); }
  /// Wakes all ranks of the group with an error that gives this reason. For a rank that can't go on.
  void abort(std::string_view reason) const noexcept { transport_->abort(reason); }

  /// 1, 2, 3...: names for what all ranks make in the same order.
  uint64_t next_number() const { return transport_->next_number(); }

  /// An operation took another way than through this group: it counts all the same.
  void count(Operation operation, uint64_t bytes) const { transport_->count(operation, bytes); }
  Traffic traffic(Operation operation) const { return transport_->traffic(operation); }
  void reset_traffic() const { transport_->reset_traffic(); }

 private:
  std::shared_ptr<Transport> transport_;
  std::chrono::milliseconds limit_;
};

/// The place of a group in a list of distinct groups, to which it is added if it is new.
template <class List>
size_t find_or_add(List& groups, const Communicator& group) {
  size_t place = 0;
  while (place < groups.size() && !groups[place].same_group(group)) place++;
  if (place == groups.size()) groups.push_back(group);
  return place;
}

}  // namespace tessera
