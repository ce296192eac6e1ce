#include "tessera/comm/c10d/collectives.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <limits>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/backend/no_sigpipe.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/link.h"

namespace tessera {
namespace {

// How long a rank whose collective has failed waits for the other ranks to tell the reason.
constexpr auto kLinkPatience = std::chrono::seconds(2);

/// Views the values as bytes: a copy is the same for every dtype, and some backends support few dtypes.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.view({-1}).view(at::kByte);
}

/// Views complex numbers as pairs of real numbers, which have the same sums.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor.view({-1});
}

c10d::ReduceOp op_of(Reduce op) {
  switch (op) {
    case Reduce::Min:
      return c10d::ReduceOp::MIN;
    case Reduce::Max:
      return c10d::ReduceOp::MAX;
    case Reduce::Sum:
    case Reduce::Mean:  // a sum that is divided later, because not every backend supports means
      break;
  }
  return c10d::ReduceOp::SUM;
}

template <class Options>
Options with_limit(const Launch& start) {
  Options options;
  options.timeout = time_until(start.end);
  return options;
}

}  // namespace

CollectivesTransport::CollectivesTransport(GroupTraits traits, std::shared_ptr<Link> link, BackendPtr backend, MakeBackend make)
    : Transport(with_ranks_of(*link, std::move(traits))), link_(std::move(link)), backend_(std::move(backend)), make_(std::move(make)) {
  const auto device = this->traits().device;
  if (!device.is_cpu()) queue_.emplace(device);
}

Moved CollectivesTransport::run(const Request& request, const Launch& start) {
  const auto act = [&] {
    Moved moved;
    for (const auto& piece : request.pieces) moved.bytes += move(request, piece, start);
    return moved;
  };
  if (queue_) return queue_->run(start, act);
  const NoSigpipe no_sigpipe;
  return act();
}

template <class Begin>
void CollectivesTransport::collective(const Launch& start, const Begin& begin) const try {
  const auto work = begin();
  if (queue_) {
    work->wait();  // does not block this thread: work that it queues from now on runs after the collective
  } else {
    work->wait(time_until(start.end));
  }
} catch (const std::exception& error) {
  const bool late = Clock::now() >= start.end;
  auto failure = others_are_late(*link_);
  bool failed_on_all = false;
  try {
    // Finds out whether the collective failed on every rank. A rank on which it did not fail combines the hash of its next operation, which
    // is not 0.
    Digest digest{.what = Extremes::of(0), .known = {}};
    link_->combine(digest, Clock::now() + (late ? kLinkPatience : 2 * kLinkPatience));
    failed_on_all = digest.agrees();
  } catch (const LinkFailure& found) {
    if (found.kind != LinkFailure::Kind::Late) throw;
    failure.ranks = found.ranks;
  }
  if (late) throw failure;
  if (failed_on_all) throw CommError("{} (on every rank, so no single rank is to blame)", first_line(error));
  throw;  // no other rank has given up, so the error is this rank's own
}

uint64_t CollectivesTransport::move(const Request& request, const Piece& piece, const Launch& start) {
  const auto& [op, wire, sum] = request.reduction;
  const auto ranks = static_cast<uint64_t>(traits().size);
  if (piece.squares) *piece.squares = std::numeric_limits<double>::quiet_NaN();
  if (piece.whole.numel() == 0) return 0;
  uint64_t sent = 0;
  if (request.operation == Operation::AllGather) {
    auto whole = as_bytes(piece.whole), own = as_bytes(piece.own);
    collective(start, [&] { return backend_->_allgather_base(whole, own, with_limit<c10d::AllgatherOptions>(start)); });
    sent = own.nbytes() * (ranks - 1);
  } else if (request.operation == Operation::ReduceScatter) {
    const bool direct = piece.own.scalar_type() == *wire;
    // On the host, backends may overwrite the input with partial sums, so it is copied.
    auto whole = as_real(piece.whole.to(*wire, /*non_blocking=*/false, /*copy=*/!queue_));
    const auto result = direct ? piece.own : at::empty(piece.own.sizes(), piece.own.options().dtype(*wire));
    auto own = as_real(result);
    auto options = with_limit<c10d::ReduceScatterOptions>(start);
    options.reduceOp = op_of(op);
    collective(start, [&] { return backend_->_reduce_scatter_base(own, whole, options); });
    if (op == Reduce::Mean) own.div_(traits().size);
    if (!direct) piece.own.copy_(result);
    sent = whole.nbytes() - own.nbytes();
  } else if (request.operation == Operation::AllReduce) {
    const auto result = piece.whole.to(*wire);
    std::vector<at::Tensor> tensors = {as_real(result)};
    auto options = with_limit<c10d::AllreduceOptions>(start);
    options.reduceOp = op_of(op);
    collective(start, [&] { return backend_->allreduce(tensors, options); });
    if (op == Reduce::Mean) tensors.front().div_(traits().size);
    if (!result.is_same(piece.whole)) piece.whole.copy_(result);
    sent = 2 * (ranks - 1) * result.nbytes() / ranks;
  } else {
    std::vector<at::Tensor> tensors = {as_bytes(piece.whole)};
    auto options = with_limit<c10d::BroadcastOptions>(start);
    options.rootRank = request.root;
    collective(start, [&] { return backend_->broadcast(tensors, options); });
    if (traits().local_ranks.front() == request.root) sent = piece.whole.nbytes() * (ranks - 1);
  }
  if (queue_) queue_->uses(piece.whole);
  if (queue_ && request.has_parts()) queue_->uses(piece.own);
  return sent;
}

std::unique_ptr<Transport> CollectivesTransport::split(std::span<const int> colors, std::shared_ptr<Link> part) {
  auto of_part = with_ranks_of(*part, traits(), colors);
  const auto name = fmt::format("{}/{}.{}", name_, parts_++, colors[traits().local_ranks.front()]);
  auto made = std::make_unique<CollectivesTransport>(std::move(of_part), part, make_(name, part->rank(), part->size()), make_);
  made->name_ = name;
  return made;
}

void CollectivesTransport::abort(std::string_view /*reason*/) noexcept {
  try {
    backend_->abort();
  } catch (const std::exception&) {  // operations under way then end at the backend's own time limit
  }
}

}  // namespace tessera
