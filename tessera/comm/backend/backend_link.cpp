#include "tessera/comm/backend/backend_link.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/backend/backend_hub.h"
#include "tessera/comm/backend/no_sigpipe.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/bytes.h"

namespace tessera {
namespace {

class BackendLink final : public Link {
 public:
  /// `global[r]` is the number that rank r of this link has in the backend.
  BackendLink(std::shared_ptr<BackendHub> hub, std::vector<int> global, int32_t tag)
      : hub_(std::move(hub)),
        global_(std::move(global)),
        rank_(static_cast<int>(std::ranges::find(global_, hub_->rank()) - global_.begin())),
        tag_(tag) {
    hub_->use_tag(tag);
  }

  int rank() const override { return rank_; }
  std::span<const int> world_ranks() const override { return global_; }

  void combine(Digest& digest, Clock::time_point deadline) override {
    constexpr int kFew = 3;  // for so few ranks, an all-gather sends as many messages as the loop below, in one step
    if (size() <= kFew) {
      for (const auto& each : all_gather_values(*this, digest, deadline)) digest.add(each);
      return;
    }
    for (int distance = 1; distance < size(); distance *= 2) {
      Digest received;
      const Message<ConstBytes> sent{.rank = (rank_ + distance) % size(), .bytes = std::as_bytes(std::span(&digest, 1))};
      const Message<Bytes> got{.rank = (rank_ + size() - distance) % size(), .bytes = std::as_writable_bytes(std::span(&received, 1))};
      try {
        transfer(std::span(&got, 1), std::span(&sent, 1), deadline);
      } catch (LinkFailure& failure) {
        failure.is_guess = failure.kind == LinkFailure::Kind::Late;  // the peer may itself be waiting for another rank
        throw;
      }
      digest.add(received);
    }
  }

  void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override {
    copy_own(own, from[rank_]);
    send_and_receive([&](int) { return own; }, from, deadline);
  }

  void exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override {
    send_and_receive([&](int r) { return to[r]; }, from, deadline);
  }

  void all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) override {
    const auto own = to[rank_];
    std::vector<std::byte> received(own.size() * to.size());
    std::vector<Bytes> from;
    for (size_t r = 0; r < to.size(); r++) from.push_back(part_of(std::span(received), r, to.size()));
    exchange(to, from, deadline);
    std::vector<ConstBytes> rows(from.begin(), from.end());
    rows[rank_] = own;
    visit(0, rows);
  }

  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override {
    const auto tag = agree_on_tag(deadline);
    return std::make_unique<BackendLink>(hub_, part_of_world(members), tag);
  }

  void abort(std::string_view reason, int culprit) noexcept override {
    hub_->abort({.kind = LinkFailure::Kind::Aborted, .reason = std::string(reason), .culprit = culprit});
  }

  int32_t agree_on_tag(Clock::time_point deadline) {
    const auto own = !hub_->has_store() ? hub_->next_tag() : rank_ == 0 ? hub_->new_tag(deadline) : 0;
    return std::ranges::max(all_gather_values(*this, own, deadline));
  }

 private:
  template <class Span>
  struct Message {
    int rank;
    Span bytes;
  };

  template <class Outgoing>
  void send_and_receive(Outgoing to, std::span<const Bytes> from, Clock::time_point deadline) {
    std::vector<Message<Bytes>> receiving;
    std::vector<Message<ConstBytes>> sending;
    for (int r = 0; r < size(); r++) {
      if (r == rank_) continue;
      if (!from[r].empty()) receiving.push_back({r, from[r]});
      if (const ConstBytes bytes = to(r); !bytes.empty()) sending.push_back({r, bytes});
    }
    transfer(receiving, sending, deadline);
  }

  void transfer(std::span<const Message<Bytes>> receiving, std::span<const Message<ConstBytes>> sending, Clock::time_point deadline) {
    const NoSigpipe no_sigpipe;
    std::vector<std::pair<int, BackendWork>> received, sent;
    int peer = rank_;  // the peer that the current call concerns
    try {
      for (const auto& [r, bytes] : receiving) {
        peer = r;
        received.emplace_back(r, hub_->receive(bytes, global_[r], tag_));
      }
      for (const auto& [r, bytes] : sending) {
        peer = r;
        sent.emplace_back(r, hub_->send(bytes, global_[r], tag_));
      }
      for (const auto* works : {&received, &sent}) {
        for (const auto& [r, work] : *works) {
          peer = r;
          if (!work->wait(time_until(deadline))) throw std::runtime_error("aborted");
        }
      }
    } catch (const CommError& own) {  // this process can't send or receive, so no peer is to blame
      hub_->forget(received);
      if (const auto verdict = hub_->announced_verdict(); verdict && !verdict->reason.empty()) throw *verdict;
      throw LinkFailure{
          .kind = LinkFailure::Kind::Aborted, .reason = fmt::format("rank {}: {}", hub_->rank(), own.what()), .culprit = hub_->rank()};
    } catch (const std::exception& error) {
      hub_->forget(received);
      throw failure(peer, backend_error_text(error), deadline);
    }
    hub_->forget(received);
  }

  LinkFailure failure(int peer, const std::string& how, Clock::time_point deadline) {
    const bool late = Clock::now() >= deadline;
    if (late) hub_->announce_verdict();
    const auto verdict = late ? hub_->verdict() : hub_->announced_verdict();
    if (verdict && !verdict->reason.empty()) return *verdict;
    if (late) return {.kind = LinkFailure::Kind::Late, .ranks = {global_[peer]}};
    // A neighbour may have closed its connections because of the silent host, which this rank is just about to notice.
    if (auto silence = hub_->silence()) {
      if (silence->ranks.empty()) silence->ranks = {global_[peer]};
      return *silence;
    }
    auto reason = fmt::format("has closed its connection or died ({})", how);
    if (!verdict && global_[peer] != 0) {
      reason += "; the store can't be reached either: if rank 0 of the world keeps it, that rank is gone";
    }
    return {.kind = LinkFailure::Kind::Gone, .ranks = {global_[peer]}, .reason = std::move(reason)};
  }

  std::shared_ptr<BackendHub> hub_;
  const std::vector<int> global_;
  const int rank_;
  const int32_t tag_;
};

}  // namespace

std::unique_ptr<Link> own_backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                                       std::shared_ptr<ConnectionWatch> connections) {
  auto hub = std::make_shared<BackendHub>(backend, store, "verdict", std::move(connections));
  return std::make_unique<BackendLink>(std::move(hub), all_ranks(backend->getSize()), BackendHub::kFirstTag);
}

std::unique_ptr<Link> watched_backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store) {
  auto hub = std::make_shared<BackendHub>(backend, store, "verdict");
  hub->watch([backend] { backend->abort(); });
  return std::make_unique<BackendLink>(std::move(hub), all_ranks(backend->getSize()), BackendHub::kFirstTag);
}

std::unique_ptr<Link> backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                                   std::chrono::milliseconds start_limit) {
  const auto hub = shared_hub(backend, store);
  // The first tag only serves to agree on a tag that no other world over this backend uses.
  BackendLink meeting(hub, all_ranks(backend->getSize()), BackendHub::kFirstTag);
  try {
    return std::make_unique<BackendLink>(hub, all_ranks(backend->getSize()), meeting.agree_on_tag(Clock::now() + start_limit));
  } catch (const LinkFailure& failure) {
    throw CommError("rank {} can't join the process group: {}", backend->getRank(), why_not_started(failure));
  }
}

}  // namespace tessera
