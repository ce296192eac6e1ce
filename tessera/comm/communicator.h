// Collectives among the ranks of a group. Every rank must call the same operations in the same order; errors name the rank that does not.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/operation.h"
#include "tessera/comm/traits.h"
#include "tessera/comm/work.h"

namespace tessera {

class Group;
class Record;

inline constexpr std::chrono::milliseconds kStartLimit = std::chrono::minutes(5);
inline constexpr std::chrono::milliseconds kOperationLimit = std::chrono::minutes(10);

/// A rank's membership in a group: a value, cheap to copy. All copies share one queue, which runs operations in the order of the calls. If
/// ranks disagree about an operation, all of them get the same CommError and may continue. If a rank is late or gone, all get an error that
/// names it, and the group can't be used any more: every later call throws that error again.
///
/// Autograd knows nothing of these operations: tensors that require a gradient are refused, unless gradients are disabled. The functions in
/// tessera/nn/collectives.h are differentiated.
class Communicator {
 public:
  explicit Communicator(std::shared_ptr<Group> group, std::chrono::milliseconds limit = kOperationLimit);

  /// The rank of this process. Throws UsageError if the process runs as several ranks (see local_ranks).
  int rank() const;
  int size() const { return traits().size; }
  /// Which ranks share a host.
  const Topology& topology() const { return traits().topology; }
  /// The ranks as which this process runs: one, or all on a tracing engine.
  const std::vector<int>& local_ranks() const { return traits().local_ranks; }
  /// Whether this process runs as rank 0, which prints, and writes files that are needed only once.
  bool is_first() const { return local_ranks().front() == 0; }
  /// The number of a rank of this group in the world from which the group was split. Errors name ranks by it.
  int world_rank(int rank) const { return traits().world_ranks[rank]; }
  bool same_group(const Communicator& other) const { return group_ == other.group_; }
  /// Is the same for all communicators of one group, and differs from the id of every other group while one of them exists.
  const void* id() const { return group_.get(); }
  std::weak_ptr<Group> group() const { return group_; }
  /// The group's ranks, and the properties of its engine: name, device, preferred packing, whether it traces.
  const GroupTraits& traits() const;

  /// How long an operation may wait for other ranks. with_limit returns a copy for the same group.
  std::chrono::milliseconds limit() const { return limit_; }
  Communicator with_limit(std::chrono::milliseconds limit) const { return Communicator(group_, limit); }

  /// Fills each `whole` with the `own` parts of all ranks, in rank order. The dtype may be any; whole.numel() == size() * own.numel().
  /// `operands`: see Request.
  Work all_gather(std::span<const Piece> pieces, Subject subject = {}, std::span<at::Tensor> operands = {}) const;
  /// As all_gather, in a group over two levels: the ranks of each host share the memory of `whole`, and `own` lies in it.
  Work all_gather_on_host(std::span<const Piece> pieces, const Subject& subject) const;
  /// Fills each `own` with this rank's part of the `whole` tensors of all ranks, reduced in the order that Topology defines. The `whole`
  /// tensors do not change.
  Work reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction = {}, Subject subject = {}) const;
  /// Reduces the tensor in place.
  Work all_reduce(at::Tensor tensor, const Reduction& reduction = {}, Subject subject = {}) const;
  /// Copies the tensor of rank `root` to all other ranks.
  Work broadcast(at::Tensor tensor, int root = 0, Subject subject = {}) const;
  /// Returns when every rank has called it.
  void barrier(Subject subject = {}) const;
  /// A barrier that ranks may enter at any point of their programs: until all ranks are in it, other operations of the group fail with a
  /// DisagreementError.
  Work meet(Subject subject = {}) const;

  /// Collective: the smallest and the largest of the ranks' numbers. The numbers are sent in the messages by which ranks agree about an
  /// operation, so they cost no message of their own.
  Extremes extremes(uint64_t own, Subject subject) const;
  /// Collective: the text of each rank, in rank order.
  std::vector<std::string> texts(const std::string& own, Subject subject) const;

  /// Collective: ranks with equal colors form a new group, in the order of their ranks. `colors` has one color per rank, and is the same
  /// list on every rank.
  Communicator split(std::span<const int> colors) const;
  /// Like split(), but calls with equal divisions return the same group, which lasts as long as this one. Only the first call for a
  /// division is collective. Meshes consist of such groups, so that equal meshes share them.
  Communicator part(std::span<const int> colors) const;
  /// The groups that part() has split from this one.
  std::vector<Communicator> parts() const;

  /// Collective: a new group of the same ranks. Its operations need no common order with those of this group, so each thread of a program
  /// can have a group of its own.
  Communicator duplicate() const;

  /// Collective, with the same shape on every rank: memory that all ranks of the group, or those of each host, see; or why there is none.
  SharedAttempt share(const AreaShape& shape, Subject subject = {}) const;

  /// This rank's chunk of a flat tensor that every rank has in full. The tensor is padded at its end with zeros and divided into size()
  /// equal chunks.
  at::Tensor own_chunk(const at::Tensor& flat) const;
  /// The value that each of local_ranks() sees; from_replicas is the inverse.
  std::vector<at::Tensor> replicas(const at::Tensor& tensor) const;
  at::Tensor from_replicas(std::span<const at::Tensor> tensors) const;
  /// Moves rows of a batch to the device where the ranks train. Each of local_ranks() gets an equal part of the rows.
  at::Tensor to_local_ranks(const at::Tensor& rows) const;

  /// The record of this rank. Groups that were split from one another share it.
  const std::shared_ptr<Record>& record() const;
  /// Notes where the program is ("backward" of a unit), for the record.
  void enter(std::string_view phase, std::string_view unit = {}) const;
  /// Marks the end of a training step, for tracing engines. Does nothing on other engines.
  void step_done() const;
  /// For a rank that can't continue: ends this group and all groups related to it by splits. All their ranks get an error with this reason,
  /// now or at their next operation.
  void abort(std::string_view reason) const noexcept;

  /// Returns 1, 2, 3... in turn, to number objects that all ranks create in the same order.
  uint64_t next_number() const;

  /// Counts an operation that ran by other means, such as a reduction through shared memory.
  void count(Operation operation, uint64_t bytes) const;
  Traffic traffic(Operation operation) const;
  void reset_traffic() const;

 private:
  Work run(Request request, const Subject& subject) const;

  std::shared_ptr<Group> group_;
  std::chrono::milliseconds limit_;
};

}  // namespace tessera
