#include "tessera/comm/host/host_transport.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/comm/host/fill_envelope.h"
#include "tessera/comm/host/reducer.h"
#include "tessera/comm/host/shared_area.h"

namespace tessera {
namespace {

// Up to this many values, counted over all ranks, all_reduce sends everything to all ranks: one exchange instead of two.
constexpr int64_t kSmallReduction = 32 * 1024;
// How long the destructor waits for operations that were started and not waited for.
constexpr auto kFarewell = std::chrono::seconds(10);

// What time-outs are reported as: the first ends all groups, so that there is only one.
constexpr auto kLate = "late";

/// One element for each rank.
template <class T>
using Ranks = c10::SmallVector<T, 8>;

void require(std::string complaint) {
  if (!complaint.empty()) throw UsageError(std::move(complaint));
}

void expect_one_dtype(std::span<const Piece> pieces) {
  const auto differs = [&](const Piece& piece) { return piece.whole.scalar_type() != pieces.front().whole.scalar_type(); };
  const auto found = std::ranges::find_if(pieces, differs);
  if (found != pieces.end()) throw UsageError(fmt::format("piece {}: pieces of one call must have one dtype", found - pieces.begin()));
}

Transport::Traits with_place(Transport::Traits traits, const Link& link) {
  traits.size = link.size();
  traits.local_ranks = {link.rank()};
  traits.world_ranks.assign(link.world_ranks().begin(), link.world_ranks().end());
  if (traits.topology.ranks() == 1) traits.topology = Topology::one_host(traits.size);  // nobody has named hosts
  if (traits.topology.ranks() != traits.size) {
    throw UsageError(fmt::format("hosts are named for {} ranks, but there are {}", traits.topology.ranks(), traits.size));
  }
  return traits;
}

uint64_t number_of_part(uint64_t whole, uint64_t sequence, int color) {
  constexpr uint64_t kMixer = 0x9e3779b97f4a7c15;
  return ((whole ^ (sequence + 1)) * kMixer ^ static_cast<uint64_t>(color + 1)) * kMixer;
}

}  // namespace

HostTransport::HostTransport(Traits traits, std::unique_ptr<Link> link, std::shared_ptr<LinkFamily> family)
    : HostTransport(std::move(traits), std::shared_ptr<Link>(std::move(link)), std::move(family), 0) {}

HostTransport::HostTransport(Traits traits, std::shared_ptr<Link> link, std::shared_ptr<LinkFamily> family, uint64_t number)
    : Transport(with_place(std::move(traits), *link)),
      link_(std::move(link)),
      family_(std::move(family)),
      number_(number),
      envelopes_(static_cast<size_t>(link_->size())) {
  family_->add(link_);
  link_->ask([this] { return queue_.waited_for() || meetings_ > 0; }, [this] { return now_.describe(); }, queue_.watch());
  for (auto& envelope : envelopes_) envelope_bytes_.push_back(std::as_writable_bytes(std::span(&envelope, 1)));
}

HostTransport::~HostTransport() {
  // Operations that nobody has waited for may still finish, unless an exception is unwinding this rank.
  if (std::uncaught_exceptions() == 0 && queue_.wait_until_idle(kFarewell)) return;
  if (!queue_.wait_until_idle(std::chrono::milliseconds(0))) {
    link_->abort(fmt::format("rank {} left with operations under way", world_rank()), world_rank());
  }
}

Work HostTransport::all_gather(std::span<const Piece> pieces, std::span<at::Tensor> /*companions*/, const Call& call) {
  const auto envelope = envelope_for(Operation::AllGather, call, [&](Envelope& filled) {
    describe(filled, pieces, traits());
    expect_one_dtype(pieces);
    for (const auto& piece : pieces) {
      if (piece.own.scalar_type() != piece.whole.scalar_type()) throw UsageError("own and whole differ in dtype");
    }
  });
  return start(envelope, call.limit, [this, pieces = c10::SmallVector<Piece, 2>(pieces.begin(), pieces.end())](auto deadline) {
    uint64_t sent = 0;
    Ranks<Bytes> from(static_cast<size_t>(size()));
    for (const auto& piece : pieces) {
      for (size_t r = 0; r < from.size(); r++) from[r] = part_of(bytes_of(piece.whole), r, from.size());
      sent += gather(bytes_of(piece.own), from, deadline);
    }
    return sent;
  });
}

Work HostTransport::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call) {
  Reducer reducer;
  const auto envelope = envelope_for(Operation::ReduceScatter, call, [&](Envelope& filled) {
    describe(filled, pieces, traits());
    expect_one_dtype(pieces);
    if (pieces.empty()) return;
    const auto dtype = pieces.front().whole.scalar_type();
    reducer = Reducer(reduction, dtype);
    reducer.describe(filled);
    require(reducer.complaint(dtype, pieces));
  });
  return start(envelope, call.limit, [this, reducer, pieces = c10::SmallVector<Piece, 2>(pieces.begin(), pieces.end())](auto deadline) {
    uint64_t sent = 0;
    for (const auto& piece : pieces) {
      const auto outgoing = piece.whole.to(reducer.wire()).view({size(), piece.own.numel()});
      Ranks<ConstBytes> to;
      for (int64_t r = 0; r < size(); r++) to.push_back(bytes_of(outgoing[r]));
      if (piece.squares) *piece.squares = 0;
      sent += reduce(reducer, to, piece.own.view({-1}), deadline, piece.squares.get());
    }
    return sent;
  });
}

Work HostTransport::all_reduce(at::Tensor tensor, const Reduction& reduction, const Call& call) {
  Reducer reducer;
  const auto envelope = envelope_for(Operation::AllReduce, call, [&](Envelope& filled) {
    describe(filled, tensor, traits());
    reducer = Reducer(reduction, tensor.scalar_type());
    reducer.describe(filled);
    require(reducer.complaint(tensor.scalar_type()));
  });
  return start(envelope, call.limit, [this, reducer, tensor](auto deadline) {
    const auto ranks = static_cast<size_t>(size());
    const auto outgoing = tensor.to(reducer.wire()).view({-1});
    const int64_t numel = tensor.numel();
    Ranks<at::Tensor> contributions(ranks);
    Ranks<Bytes> from(ranks);
    if (numel * size() <= kSmallReduction) {
      const auto received = at::empty({size(), numel}, outgoing.options());
      for (size_t r = 0; r < ranks; r++) {
        contributions[r] = received[r];
        from[r] = bytes_of(contributions[r]);
      }
      const auto sent = gather(bytes_of(outgoing), from, deadline);
      reducer.reduce(contributions, tensor, traits().topology);
      return sent;
    }
    // Each rank reduces a chunk, then all ranks gather the results. The sums have the same bits as above.
    const int64_t chunk = (numel + size() - 1) / size();
    const auto chunk_of = [&](const at::Tensor& flat, size_t r) {
      const int64_t begin = std::min(static_cast<int64_t>(r) * chunk, numel);
      return flat.narrow(0, begin, std::min(chunk, numel - begin));
    };
    Ranks<ConstBytes> to;
    for (size_t r = 0; r < ranks; r++) to.push_back(bytes_of(chunk_of(outgoing, r)));
    const auto flat = tensor.view({-1});
    auto sent = reduce(reducer, to, chunk_of(flat, rank()), deadline);
    for (size_t r = 0; r < ranks; r++) from[r] = bytes_of(chunk_of(flat, r));
    sent += gather(from[rank()], from, deadline);
    return sent;
  });
}

Work HostTransport::broadcast(at::Tensor tensor, int root, const Call& call) {
  const auto envelope = envelope_for(Operation::Broadcast, call, [&](Envelope& filled) {
    describe(filled, tensor, traits());
    if (root < 0 || root >= size()) throw UsageError(fmt::format("rank {} does not exist in a group of {}", root, size()));
    filled.root = traits().world_ranks[static_cast<size_t>(root)];
  });
  return start(envelope, call.limit, [this, tensor, root](auto deadline) {
    const auto all = bytes_of(tensor);
    std::vector<Bytes> from(static_cast<size_t>(size()), Bytes());
    from[root] = all;
    return gather(rank() == root ? all : Bytes(), from, deadline);
  });
}

Work HostTransport::barrier(const Call& call) {
  return start(envelope_for(Operation::Barrier, call), call.limit, [](auto) { return uint64_t{0}; });
}

Work HostTransport::meet(const Call& call) {
  note_caller();
  meetings_++;
  return queue_.run([this, envelope = envelope_for(Operation::Barrier, call), limit = call.limit] {
    const auto end = c10::make_scope_exit([&] { meetings_--; });
    for (;;) {
      try {
        return run(envelope, limit, [](auto) { return uint64_t{0}; });
      } catch (const DisagreementError&) {  // a rank was in another operation, and has got this error there
      } catch (const UsageError&) {         // or could not take part in one
      }
    }
  });
}

std::unique_ptr<Transport> HostTransport::split(std::span<const int> colors, const Call& call) {
  const auto envelope = envelope_for(Operation::Split, call, [&](Envelope& filled) {
    for (const int color : colors) mix_into_layout(filled, color);
    if (static_cast<int>(colors.size()) != size()) {
      throw UsageError(fmt::format("{} colors for {} ranks; give one for each", colors.size(), size()));
    }
  });
  std::shared_ptr<Link> part;
  std::vector<int> members;
  uint64_t number = 0;
  start(envelope, call.limit, [this, &part, &members, &number, colors](auto deadline) {
    number = number_of_part(number_, now_.sequence, colors[rank()]);
    for (int r = 0; r < size(); r++) {
      if (colors[r] == colors[rank()]) members.push_back(r);
    }
    part = link_->split(members, deadline);
    return uint64_t{0};
  }).wait();
  auto part_traits = traits();
  part_traits.topology = traits().topology.part(members);
  // Not make_unique: the constructor that takes a family is private.
  return std::unique_ptr<Transport>(new HostTransport(std::move(part_traits), std::move(part), family_, number));
}

SharedAttempt HostTransport::share(const AreaShape& shape, const Call& call) {
  if (const int hosts = traits().topology.hosts(); hosts > 1) {
    return {.area = nullptr, .why_not = fmt::format("transport {}: the ranks are on {} hosts", traits().name, hosts)};
  }
  auto envelope = envelope_for(Operation::Share, call);
  envelope.numel = static_cast<int64_t>(shape.bytes_per_rank);
  envelope.pieces = shape.counters;
  SharedAttempt attempt;
  start(envelope, call.limit, [this, &attempt, shape](auto deadline) {
    attempt = link_->share(shape, deadline);
    return uint64_t{0};
  }).wait();
  if (attempt.area) {
    attempt.area->when_broken([family = family_, own = world_rank()](const LinkFailure& failure, std::string_view message) {
      const int culprit = record_culprit(failure, own);
      if (failure.kind == LinkFailure::Kind::Late) family->report(kLate, message);
      if (failure.kind != LinkFailure::Kind::Aborted) family->abort(own, message, culprit);
    });
  } else {
    attempt.why_not = fmt::format("transport {}: {}", traits().name, attempt.why_not);
  }
  return attempt;
}

void HostTransport::abort(std::string_view reason) noexcept {
  family_->abort(world_rank(), reason, world_rank());
}

void HostTransport::note_caller() {
  callers_.note();
  link_->used_by_this_thread();
}

Work HostTransport::start(Envelope envelope, std::chrono::milliseconds limit, Move move) {
  note_caller();
  return queue_.run([this, envelope, limit, move = std::move(move)] { run(envelope, limit, move); });
}

void HostTransport::run(Envelope envelope, std::chrono::milliseconds limit, const Move& move) {
  // Transfers need no autograd and no version counters, and the buffers may be inference tensors, which only this mode may write.
  const c10::InferenceMode inference;
  if (broken_) std::rethrow_exception(broken_);
  envelope.sequence = sequence_++;
  now_ = envelope;
  const auto deadline = Clock::now() + limit;
  const auto recorded = family_->recorder().begin(number_, envelope);
  auto outcome = FlightRecorder::Outcome::Failed;
  const auto record = c10::make_scope_exit([&] { family_->recorder().end(recorded, outcome); });
  try {
    agree(envelope, deadline);
    run_agreed(envelope, deadline, move);
    outcome = FlightRecorder::Outcome::Done;
  } catch (const LinkFailure& failure) {
    fail(failure, envelope, limit);
  } catch (const DisagreementError& error) {
    // Ranks come to tessera::recover from different points of their programs.
    if (std::ranges::none_of(envelopes_, &Envelope::recovers)) {
      family_->report(fmt::format("{:x}-{}", number_, envelope.sequence), error.what());
    }
    throw;
  }
}

void HostTransport::run_agreed(const Envelope& envelope, Clock::time_point deadline, const Move& move) {
  try {
    count(envelope.operation, move(deadline));
    last_ = envelope;
  } catch (const std::exception& error) {
    // After agreement the other ranks wait for this one, so they must be told.
    const auto message =
        fmt::format("operation {} of rank {}, {}, failed: {}", envelope.sequence, world_rank(), envelope.describe(), first_line(error));
    broken_ = std::make_exception_ptr(CommError(message));
    family_->abort(world_rank(), message, world_rank());
    std::rethrow_exception(broken_);
  }
}

void HostTransport::agree(const Envelope& envelope, Clock::time_point deadline) {
  link_->all_gather(std::as_bytes(std::span(&envelope, 1)), envelope_bytes_, deadline);
  expect_agreement(envelopes_, traits().world_ranks, callers_.callers());
}

uint64_t HostTransport::reduce(const Reducer& reducer, std::span<const ConstBytes> to, const at::Tensor& own, Clock::time_point deadline,
                               double* squares) {
  const auto width = c10::elementSize(reducer.wire());
  Ranks<at::Tensor> contributions(to.size());
  link_->visit_all_to_all(
      to,
      [&](size_t begin, std::span<const ConstBytes> rows) {
        const auto count = static_cast<int64_t>(rows.front().size() / width);
        if (count == 0) return;  // other ranks have longer parts
        for (size_t r = 0; r < rows.size(); r++) {
          contributions[r] = at::from_blob(const_cast<std::byte*>(rows[r].data()), {count}, at::TensorOptions().dtype(reducer.wire()));
        }
        reducer.reduce(contributions, own.narrow(0, static_cast<int64_t>(begin / width), count), traits().topology, squares);
      },
      deadline);
  return sent_to_others(to);
}

uint64_t HostTransport::gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  link_->all_gather(own, from, deadline);
  return own.size() * (from.size() - 1);
}

uint64_t HostTransport::sent_to_others(std::span<const ConstBytes> to) const {
  const auto all = std::accumulate(to.begin(), to.end(), uint64_t{0}, [](uint64_t sum, ConstBytes part) { return sum + part.size(); });
  return all - to[static_cast<size_t>(rank())].size();
}

void HostTransport::fail(const LinkFailure& failure, const Envelope& envelope, std::chrono::milliseconds limit) {
  const auto what = fmt::format("operation {} of rank {}, {}", envelope.sequence, world_rank(), envelope.describe());
  // Every operation begins with an exchange among all ranks, so the failed ranks came at least to the last operation that finished here.
  const auto before =
      last_ ? fmt::format("the last that {} came to was operation {}, {}", name_ranks(failure.ranks), last_->sequence, last_->describe())
            : fmt::format("it is the first of this group");
  const int culprit = record_culprit(failure, world_rank());
  switch (failure.kind) {
    case LinkFailure::Kind::Late: {
      const auto message = fmt::format("{}, waited {} s for {} and gave up; {}", what, std::chrono::duration<double>(limit).count(),
                                       name_ranks(failure.ranks), before);
      broken_ = std::make_exception_ptr(TimeoutError(message));
      family_->report(kLate, message);
      family_->abort(world_rank(), message, culprit);
      break;
    }
    case LinkFailure::Kind::Gone: {
      const auto message = fmt::format("{}, can't finish: {} {}; {}", what, name_ranks(failure.ranks), failure.reason, before);
      broken_ = std::make_exception_ptr(CommError(message));
      family_->abort(world_rank(), message, culprit);
      break;
    }
    case LinkFailure::Kind::Deadlocked:
    case LinkFailure::Kind::Aborted:
      broken_ = std::make_exception_ptr(CommError(fmt::format("{}, was broken off: {}", what, failure.reason)));
      break;
  }
  std::rethrow_exception(broken_);
}

std::shared_ptr<Transport> host_transport(Transport::Traits traits, std::unique_ptr<Link> link, std::shared_ptr<LinkFamily> family) {
  return std::make_shared<HostTransport>(std::move(traits), std::move(link), std::move(family));
}

}  // namespace tessera
