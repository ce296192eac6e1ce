#include "tessera/comm/host_transport.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera {
namespace {

// Below this, an all_reduce sends everything to everybody: one exchange instead of two.
constexpr int64_t kSmallReduction = 32 * 1024;

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

Bytes part(const Bytes& all, size_t index, size_t parts) {
  return all.subspan(index * (all.size() / parts), all.size() / parts);
}

void mix(uint64_t& hash, uint64_t value) {
  hash = (hash ^ value) * 0x100000001b3ULL + 0x9e3779b97f4a7c15ULL;
}

/// The dtype to add in when the caller does not say: nothing narrower than float32.
at::ScalarType default_sum_dtype(at::ScalarType dtype) {
  return at::isFloatingType(dtype) && c10::elementSize(dtype) < 4 ? at::kFloat : dtype;
}

/// Why a buffer can't be moved, or nothing.
std::string complaint(const at::Tensor& tensor, std::string_view what, std::string_view transport) {
  if (!tensor.defined()) return fmt::format("{} is undefined", what);
  if (!tensor.device().is_cpu()) {
    return fmt::format("{} is on {}; transport {} moves host memory, pass a CPU tensor", what, tensor.device().str(), transport);
  }
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) return fmt::format("{} is not contiguous; pass .contiguous()", what);
  return {};
}

std::string complaint(const Piece& piece, int rank, int size, std::string_view transport) {
  if (auto why = complaint(piece.whole, "whole", transport); !why.empty()) return why;
  if (auto why = complaint(piece.own, "own", transport); !why.empty()) return why;
  if (piece.whole.numel() != piece.own.numel() * size) {
    return fmt::format("whole has {} elements, but {} ranks with own parts of {} make {}", piece.whole.numel(), size, piece.own.numel(),
                       piece.own.numel() * size);
  }
  const auto whole = bytes_of(piece.whole), own = bytes_of(piece.own);
  const bool overlap = !own.empty() && own.data() < whole.data() + whole.size() && whole.data() < own.data() + own.size();
  if (overlap && own.data() != part(whole, rank, size).data()) {
    return fmt::format("own overlaps whole, but does not lie at the place of rank {}", rank);
  }
  return {};
}

}  // namespace

/// The arithmetic of one reduction: chosen once, the same on every link.
struct HostTransport::Reducer {
  Reduce op;
  at::ScalarType wire;
  at::ScalarType sum;

  Reducer(const Reduction& reduction, at::ScalarType dtype)
      : op(reduction.op),
        wire(reduction.wire_dtype.value_or(dtype)),
        sum(reduction.sum_dtype.value_or(default_sum_dtype(wire == dtype ? dtype : at::promoteTypes(dtype, default_sum_dtype(wire))))) {}

  std::string complaint(at::ScalarType dtype) const {
    const bool floating = at::isFloatingType(dtype) && at::isFloatingType(wire) && at::isFloatingType(sum);
    const bool integral = at::isIntegralType(dtype, /*includeBool=*/false) && wire == dtype && sum == dtype;
    if (!floating && !integral) {
      return fmt::format("can't reduce {} sent as {} and added in {}", c10::toString(dtype), c10::toString(wire), c10::toString(sum));
    }
    if (integral && op == Reduce::Mean) return fmt::format("the mean of {} is not a whole number; use sum", c10::toString(dtype));
    return {};
  }

  /// One value from the contributions of all ranks, in rank order.
  at::Tensor reduce(std::span<const at::Tensor> contributions) const {
    auto result = contributions.front().to(sum, /*non_blocking=*/false, /*copy=*/true);
    for (const auto& next : contributions.subspan(1)) {
      const auto value = next.to(sum);
      if (op == Reduce::Min) {
        at::minimum_out(result, result, value);
      } else if (op == Reduce::Max) {
        at::maximum_out(result, result, value);
      } else {
        result.add_(value);
      }
    }
    if (op == Reduce::Mean) result.div_(static_cast<int64_t>(contributions.size()));
    return result;
  }

  void describe(Envelope& envelope) const {
    envelope.reduce = static_cast<uint8_t>(op);
    envelope.wire_dtype = static_cast<int8_t>(wire);
    envelope.sum_dtype = static_cast<int8_t>(sum);
  }
};

namespace {

Envelope envelope_for(Operation operation, const Call& call) {
  Envelope envelope;
  envelope.operation = operation;
  envelope.version = call.subject.version;
  envelope.set_unit(call.subject.unit);
  return envelope;
}

Envelope envelope_for(Operation operation, const Call& call, const at::Tensor& tensor, std::string_view transport) {
  auto envelope = envelope_for(operation, call);
  if (tensor.defined()) {
    envelope.pieces = 1;
    envelope.numel = tensor.numel();
    envelope.dtype = envelope.wire_dtype = envelope.sum_dtype = static_cast<int8_t>(tensor.scalar_type());
  }
  if (auto why = complaint(tensor, "the tensor", transport); !why.empty()) envelope.refuse(why);
  return envelope;
}

Envelope envelope_for(Operation operation, const Call& call, std::span<const Piece> pieces, int rank, const Transport::Traits& traits) {
  auto envelope = envelope_for(operation, call);
  envelope.pieces = static_cast<int32_t>(pieces.size());
  for (size_t i = 0; i < pieces.size(); i++) {
    const auto& whole = pieces[i].whole;
    auto why = complaint(pieces[i], rank, traits.size, traits.name);
    if (whole.defined()) {
      const auto dtype = static_cast<int8_t>(whole.scalar_type());
      if (i == 0) envelope.dtype = envelope.wire_dtype = envelope.sum_dtype = dtype;
      if (why.empty() && dtype != envelope.dtype) why = "pieces of one call must have one dtype";
      envelope.numel += whole.numel();
      mix(envelope.layout, static_cast<uint64_t>(whole.numel()));
    }
    if (!why.empty()) {
      envelope.refuse(fmt::format("piece {}: {}", i, why));
      break;
    }
  }
  return envelope;
}

}  // namespace

HostTransport::HostTransport(std::string name, std::unique_ptr<Link> link)
    : Transport({.name = std::move(name), .size = link->size(), .local_ranks = {link->rank()}}),
      link_(std::move(link)),
      envelopes_(static_cast<size_t>(link_->size())) {}

HostTransport::~HostTransport() {
  // Operations under way finish first. When an exception ends this rank's part they never would, so the others are told.
  if (std::uncaught_exceptions() > 0 && !queue_.idle()) abort("an exception ended its work in the middle of an operation");
}

Work HostTransport::all_gather(std::span<const Piece> pieces, std::span<at::Tensor> /*companions*/, const Call& call) {
  auto envelope = envelope_for(Operation::AllGather, call, pieces, rank(), traits());
  for (const auto& piece : pieces) {
    if (!envelope.refused && piece.own.scalar_type() != piece.whole.scalar_type()) envelope.refuse("own and whole differ in dtype");
  }
  return start(envelope, call.limit, [this, pieces = std::vector(pieces.begin(), pieces.end())](auto deadline) {
    uint64_t sent = 0;
    std::vector<Bytes> from(static_cast<size_t>(size()));
    for (const auto& piece : pieces) {
      for (size_t r = 0; r < from.size(); r++) from[r] = part(bytes_of(piece.whole), r, from.size());
      sent += gather(bytes_of(piece.own), from, deadline);
    }
    return sent;
  });
}

Work HostTransport::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call) {
  auto envelope = envelope_for(Operation::ReduceScatter, call, pieces, rank(), traits());
  const auto dtype = static_cast<at::ScalarType>(envelope.dtype);
  const Reducer reducer(reduction, dtype);
  reducer.describe(envelope);
  if (auto why = reducer.complaint(dtype); !why.empty() && !envelope.refused) envelope.refuse(why);
  return start(envelope, call.limit, [this, reducer, pieces = std::vector(pieces.begin(), pieces.end())](auto deadline) {
    uint64_t sent = 0;
    const auto ranks = static_cast<size_t>(size());
    const auto self = static_cast<size_t>(rank());
    for (const auto& piece : pieces) {
      const auto outgoing = piece.whole.to(reducer.wire).view({size(), piece.own.numel()});
      // Room for what the others send; this rank's own part is read where it lies.
      const auto room = at::empty({size() - 1, piece.own.numel()}, outgoing.options());
      std::vector<at::Tensor> contributions(ranks);
      std::vector<ConstBytes> to(ranks);
      std::vector<Bytes> from(ranks);
      for (size_t r = 0; r < ranks; r++) {
        contributions[r] = r == self ? outgoing[self] : room[r < self ? r : r - 1];
        to[r] = bytes_of(outgoing[r]);
        from[r] = bytes_of(contributions[r]);
      }
      sent += transpose(to, from, deadline);
      piece.own.copy_(reducer.reduce(contributions).view_as(piece.own));
    }
    return sent;
  });
}

Work HostTransport::all_reduce(at::Tensor tensor, const Reduction& reduction, const Call& call) {
  auto envelope = envelope_for(Operation::AllReduce, call, tensor, traits().name);
  const auto dtype = static_cast<at::ScalarType>(envelope.dtype);
  const Reducer reducer(reduction, dtype);
  reducer.describe(envelope);
  if (auto why = reducer.complaint(dtype); !why.empty() && !envelope.refused) envelope.refuse(why);
  return start(envelope, call.limit, [this, reducer, tensor](auto deadline) {
    const auto ranks = static_cast<size_t>(size());
    const auto outgoing = tensor.to(reducer.wire).view({-1});
    const int64_t numel = tensor.numel();
    std::vector<at::Tensor> contributions(ranks);
    std::vector<Bytes> from(ranks);
    if (numel * size() <= kSmallReduction) {
      const auto room = at::empty({size(), numel}, outgoing.options());
      for (size_t r = 0; r < ranks; r++) {
        contributions[r] = room[r];
        from[r] = bytes_of(contributions[r]);
      }
      const auto sent = gather(bytes_of(outgoing), from, deadline);
      tensor.copy_(reducer.reduce(contributions).view_as(tensor));
      return sent;
    }
    // Each rank reduces a chunk, then all gather the results. The sums are the same to the bit.
    const int64_t chunk = (numel + size() - 1) / size();
    const auto part_of = [&](const at::Tensor& flat, size_t r) {
      const int64_t begin = std::min(static_cast<int64_t>(r) * chunk, numel);
      return flat.narrow(0, begin, std::min(chunk, numel - begin));
    };
    const auto own = part_of(outgoing, rank());
    const auto room = at::empty({size(), own.numel()}, outgoing.options());
    std::vector<ConstBytes> to(ranks);
    for (size_t r = 0; r < ranks; r++) {
      contributions[r] = room[r];
      to[r] = bytes_of(part_of(outgoing, r));
      from[r] = bytes_of(contributions[r]);
    }
    auto sent = transpose(to, from, deadline);
    const auto flat = tensor.view({-1});
    part_of(flat, rank()).copy_(reducer.reduce(contributions));
    for (size_t r = 0; r < ranks; r++) from[r] = bytes_of(part_of(flat, r));
    sent += gather(from[rank()], from, deadline);
    return sent;
  });
}

Work HostTransport::broadcast(at::Tensor tensor, int root, const Call& call) {
  auto envelope = envelope_for(Operation::Broadcast, call, tensor, traits().name);
  envelope.root = root;
  if (root < 0 || root >= size()) envelope.refuse(fmt::format("rank {} does not exist in a group of {}", root, size()));
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

std::unique_ptr<Transport> HostTransport::split(std::span<const int> colors, const Call& call) {
  auto envelope = envelope_for(Operation::Split, call);
  for (const int color : colors) mix(envelope.layout, static_cast<uint64_t>(color));
  if (static_cast<int>(colors.size()) != size()) {
    envelope.refuse(fmt::format("{} colors for {} ranks; give one for each", colors.size(), size()));
  }
  std::unique_ptr<Link> part;
  start(envelope, call.limit, [this, &part, colors](auto deadline) {
    std::vector<int> members;
    for (int r = 0; r < size(); r++) {
      if (colors[r] == colors[rank()]) members.push_back(r);
    }
    part = link_->split(members, deadline);
    return uint64_t{0};
  }).wait();
  return std::make_unique<HostTransport>(traits().name, std::move(part));
}

void HostTransport::abort(std::string_view reason) noexcept {
  link_->abort(reason);
}

Work HostTransport::start(Envelope envelope, std::chrono::milliseconds limit, Move move) {
  return queue_.run([this, envelope, limit, move = std::move(move)]() mutable {
    const c10::AutoGradMode no_grad(false);
    if (broken_) std::rethrow_exception(broken_);
    envelope.sequence = sequence_++;
    const auto deadline = Clock::now() + limit;
    try {
      agree(envelope, deadline);
      run_agreed(envelope, deadline, move);
    } catch (const LinkFailure& failure) {
      fail(failure, envelope, limit);
    }
  });
}

void HostTransport::run_agreed(const Envelope& envelope, Clock::time_point deadline, const Move& move) {
  try {
    count(envelope.operation, move(deadline));
    last_ = envelope;
  } catch (const std::exception& error) {
    // The others count on this rank by now.
    const auto message =
        fmt::format("operation {} of rank {}, {}, failed: {}", envelope.sequence, rank(), envelope.describe(), error.what());
    broken_ = std::make_exception_ptr(CommError(message));
    link_->abort(message);
    std::rethrow_exception(broken_);
  }
}

void HostTransport::agree(const Envelope& envelope, Clock::time_point deadline) {
  std::vector<Bytes> from(envelopes_.size());
  for (size_t r = 0; r < from.size(); r++) from[r] = std::as_writable_bytes(std::span(&envelopes_[r], 1));
  link_->gather(std::as_bytes(std::span(&envelope, 1)), from, deadline);
  expect_agreement(envelopes_);
}

uint64_t HostTransport::gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) {
  link_->gather(own, from, deadline);
  return own.size() * (from.size() - 1);
}

uint64_t HostTransport::transpose(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) {
  link_->transpose(to, from, deadline);
  const auto all = std::accumulate(to.begin(), to.end(), uint64_t{0}, [](uint64_t sum, ConstBytes part) { return sum + part.size(); });
  return all - to[rank()].size();
}

void HostTransport::fail(const LinkFailure& failure, const Envelope& envelope, std::chrono::milliseconds limit) {
  const auto before = last_ ? fmt::format("the last that all ranks did together was operation {}, {}", last_->sequence, last_->describe())
                            : std::string("no operation of this group came before");
  const auto what = fmt::format("operation {} of rank {}, {}", envelope.sequence, rank(), envelope.describe());
  switch (failure.kind) {
    case LinkFailure::Kind::Late: {
      const auto message = fmt::format("{}, waited {} s for {} and gave up; {}", what, std::chrono::duration<double>(limit).count(),
                                       name_ranks(failure.ranks), before);
      broken_ = std::make_exception_ptr(TimeoutError(message));
      link_->abort(message);
      break;
    }
    case LinkFailure::Kind::Gone: {
      const auto message = fmt::format("{}, can't finish: {} {}; {}", what, name_ranks(failure.ranks), failure.reason, before);
      broken_ = std::make_exception_ptr(CommError(message));
      link_->abort(message);
      break;
    }
    case LinkFailure::Kind::Aborted:
      broken_ = std::make_exception_ptr(CommError(fmt::format("{}, was broken off: {}", what, failure.reason)));
      break;
  }
  std::rethrow_exception(broken_);
}

std::shared_ptr<Transport> host_transport(std::string name, std::unique_ptr<Link> link) {
  return std::make_shared<HostTransport>(std::move(name), std::move(link));
}

}  // namespace tessera
