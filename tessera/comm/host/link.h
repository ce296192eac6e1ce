// Link: moves bytes between ranks in host memory. Every group of several processes has a link, over which its ranks agree, whichever
// transport moves their data.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/operation.h"
#include "tessera/comm/traits.h"

namespace tessera {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;
using Clock = std::chrono::steady_clock;

/// The smallest and the largest of all ranks' values, for each of two numbers, by which ranks find out in messages of constant size whether
/// they differ. Links send a digest as plain bytes. Adding the same digest twice changes nothing.
struct Digest {
  Extremes what;   // the extremes of a hash over what each rank is about to do
  Extremes known;  // the extremes of a number that only some ranks may have

  /// A digest that agrees with no other digest: if one rank has it, all ranks see that they do not agree.
  static Digest unfit() { return {.what = {.least = 0, .most = std::numeric_limits<uint64_t>::max()}, .known = {}}; }

  void add(const Digest& other) {
    what.add(other.what);
    known.add(other.known);
  }
  bool agrees() const { return what.are_one() && known.are_one(); }
};

/// Thrown by a link, with the reason why bytes did not arrive. Group turns it into an error that names the operation.
struct LinkFailure {
  enum class Kind { Late, Gone, Aborted, Deadlocked };
  Kind kind;
  std::vector<int> ranks = {};  // for Late and Gone: the world ranks that are late or gone
  std::string reason = {};      // for Aborted: the reason of the rank that aborted; for Gone: how this was noticed
  int culprit = -1;             // for Aborted: the world rank that made the group fail
  bool is_guess = false;        // for Late: the ranks in `ranks` may not be late, but wait for others themselves
};

/// The caller must make all calls from one thread at a time, and in the same order with the same sizes on every rank. Only abort() may come
/// from another thread. A call that fails throws LinkFailure; after that, only abort() and destruction are allowed.
class Link {
 public:
  virtual ~Link() = default;

  virtual int rank() const = 0;
  /// The number of each rank in the world from which the link was split. Errors name ranks by these.
  virtual std::span<const int> world_ranks() const = 0;
  int size() const { return static_cast<int>(world_ranks().size()); }

  /// Adds the digests of all ranks to `digest`.
  virtual void combine(Digest& digest, Clock::time_point deadline) = 0;

  /// from[r] receives the `own` of rank r. from[rank()] may be `own` itself.
  virtual void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) = 0;
  /// Sends to[r] to rank r and receives from[r] from it, for each rank r but this one. Both ranks know the size, which may be 0.
  virtual void exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) = 0;
  /// Sends to[r] to rank r. `visit(begin, rows)` gets the received data in place, one range after the other: rows[r] is the part from byte
  /// `begin` on of the data that rank r, which may be this rank, sends to this rank.
  using Visit = c10::function_ref<void(size_t begin, std::span<const ConstBytes> rows)>;
  virtual void all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) = 0;

  /// The world ranks of some ranks of this link.
  std::vector<int> part_of_world(std::span<const int> members) const;

  /// Collective over all ranks of this link: a link among `members`, which are ranks of this link in ascending order and include this rank.
  virtual std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) = 0;

  /// Collective: memory that all ranks see, or why there is none.
  virtual SharedAttempt share(const AreaShape& shape, Clock::time_point deadline);

  /// Sets the functions that the link calls when it looks for deadlocks: whether the program waits for the current call, what that call is,
  /// and whether any calls are under way. `is_busy` may be called after the link is destroyed.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): links keep them
  virtual void ask(std::function<bool()> /*does_wait*/, std::function<std::string()> /*what*/, std::function<bool()> /*is_busy*/) {}

  /// Records that the calling thread of the program uses the group.
  virtual void used_by_this_thread() {}

  /// Makes every wait of every rank fail with this reason. `culprit` is the world rank that made the group fail. Only the first abort
  /// counts.
  virtual void abort(std::string_view reason, int culprit) noexcept = 0;
};

/// Collective: the value of each rank, in rank order. It is sent as plain bytes.
template <class T>
std::vector<T> all_gather_values(Link& link, const T& own, Clock::time_point deadline) {
  std::vector<T> values(link.size());
  std::vector<Bytes> from;
  for (auto& value : values) from.push_back(std::as_writable_bytes(std::span(&value, 1)));
  link.all_gather(std::as_bytes(std::span(&own, 1)), from, deadline);
  return values;
}
/// Collective: the text of each rank, in rank order. Nothing more is sent if all are empty.
std::vector<std::string> all_gather_texts(Link& link, const std::string& own, Clock::time_point deadline);
/// The ranks with the color of `rank`, in ascending order.
std::vector<int> members_of(std::span<const int> colors, int rank);
/// Returns the traits with the ranks of the link.
GroupTraits with_ranks_of(const Link& link, GroupTraits traits);
/// Returns the traits of a part of the group, given the link of the part.
GroupTraits with_ranks_of(const Link& part, GroupTraits whole, std::span<const int> colors);
/// The failure of an operation that has not ended in time, if it is unknown which of the other ranks is late.
LinkFailure others_are_late(const Link& link);
/// Makes the error for the failure of an operation, or of a wait, that `what` describes. If ranks are late or gone, the message ends with
/// `rest`.
std::exception_ptr error_of(const LinkFailure& failure, std::string_view what, std::chrono::milliseconds limit, std::string_view rest);
/// The reason why a link was not made, in words for an error.
std::string why_not_started(const LinkFailure& failure);

/// Copies what a rank sends to itself, unless it is in place already.
void copy_own(ConstBytes own, Bytes target);

}  // namespace tessera
