// Moves bytes among ranks in host memory: all that threads, shm, gloo and fake have to do themselves. HostTransport does the rest once.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;
using Clock = std::chrono::steady_clock;

/// Why bytes did not arrive. HostTransport turns it into an error that says what they were for.
struct LinkFailure {
  enum class Kind { Late, Gone, Aborted, Deadlocked };
  Kind kind;
  std::vector<int> ranks;  // the late or the gone
  std::string reason;      // what an aborting rank said, or how it is known that a rank is gone
  int culprit = -1;        // of an abort: the world rank that made the group fail
};

struct AreaShape;
struct SharedAttempt;

/// Calls come from one thread at a time, and in the same order with the same sizes on every rank: the caller has made sure of that.
/// Only abort() may come from another thread. Every call throws LinkFailure, and after that only abort() and destruction are allowed.
class Link {
 public:
  virtual ~Link() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Every rank gets what every other has: from[r] receives the `own` of rank r. from[rank()] may be `own` itself.
  virtual void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) = 0;
  /// Every rank has something else for each: from[r] receives what rank r had in its to[rank()].
  virtual void all_to_all(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) = 0;

  /// The same, but what has come is looked at where it lies, piece by piece: `visit(begin, rows)` gets a range of what each rank has for
  /// this one, itself included, that begins at so many bytes.
  using Visit = c10::function_ref<void(size_t begin, std::span<const ConstBytes> rows)>;
  virtual void visit_all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline);

  /// A link among `members`, which are ranks of this one in ascending order, this rank among them. All ranks call it at once.
  virtual std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) = 0;

  /// Memory that all ranks see, where they can see any together.
  virtual SharedAttempt share(const AreaShape& shape, Clock::time_point deadline);

  /// Who can say of a call that lasts whether the program waits for it, and what it is, in words; and whether calls are under way at all,
  /// also when the link is gone.
  virtual void ask(std::function<bool()> /*does_wait*/, std::function<std::string()> /*what*/, std::function<bool()> /*is_busy*/) {}

  /// A thread of the program uses the group.
  virtual void used_by_this_thread() {}

  /// Lets all others know that nothing more will come, why, and because of which world rank. The first reason stays.
  virtual void abort(std::string_view reason, int culprit) noexcept = 0;
};

/// What a rank has for itself needs no link.
void copy_own(ConstBytes own, Bytes target);

}  // namespace tessera
