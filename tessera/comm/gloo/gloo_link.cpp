#include "tessera/comm/gloo/gloo_link.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/envelope.h"

namespace tessera {
namespace {

// Tags of messages that others send over the same backend are small.
constexpr int32_t kFirstTag = 0x54000000;
constexpr auto kVerdictLimit = std::chrono::seconds(2);
constexpr auto kWatchInterval = std::chrono::milliseconds(500);

/// Keeps SIGPIPE from this thread, and from threads that it starts. gloo writes to sockets whose other end may be dead, and counts on
/// Python, which ignores that signal; in a C++ program it would end the process without a word.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&only_);
    ::sigaddset(&only_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &only_, &before_);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;
  ~NoSigpipe() {
    if (::sigismember(&before_, SIGPIPE) == 0) {
      const timespec now{};
      ::sigtimedwait(&only_, nullptr, &now);  // one that came meanwhile
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t only_, before_;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The first line of what c10d or gloo says: the rest is a stack trace. (A function of its own, so that the thread sanitizer can be told
/// about it: the text may come from gloo's thread, ordered by a lock that the sanitizer does not see.)
[[gnu::noinline]] std::string words_of_gloo(const std::exception& error) {
  return first_line(error);
}

/// Why a group has failed, and because of which world rank.
struct Verdict {
  std::string reason;
  int culprit = -1;

  /// As it is in the store: the rank, a blank, the reason.
  std::string packed() const { return fmt::format("{} {}", culprit, reason); }
  static Verdict unpacked(const std::string& text) {
    const auto blank = text.find(' ');
    if (blank == std::string::npos) return {};
    Verdict verdict{.reason = text.substr(blank + 1)};
    std::from_chars(text.data(), text.data() + blank, verdict.culprit);
    return verdict;
  }
};

at::Tensor as_tensor(ConstBytes bytes) {
  return at::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

/// All that the links over one backend have in common: when one of them fails, all do, because gloo then closes every connection.
class Hub {
 public:
  Hub(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, std::string key)
      : rank_(backend->getRank()), backend_(std::move(backend)), store_(std::move(store)), key_(std::move(key)) {
    if (store_) store_ = store_->clone();  // a connection of its own: other threads may be waiting over that one
  }

  int rank() const { return rank_; }

  WorkPtr receive(Bytes bytes, int peer, int32_t tag) {
    std::lock_guard lock(mutex_);
    expect_running();
    std::vector<at::Tensor> target = {as_tensor(bytes)};
    auto work = backend_->recv(target, peer, tag);
    receiving_.push_back(work);
    return work;
  }

  WorkPtr send(ConstBytes bytes, int peer, int32_t tag) {
    std::lock_guard lock(mutex_);
    expect_running();
    std::vector<at::Tensor> source = {as_tensor(bytes)};
    return backend_->send(source, peer, tag);
  }

  void forget(std::span<const std::pair<int, WorkPtr>> works) {
    std::lock_guard lock(mutex_);
    for (const auto& entry : works) std::erase(receiving_, entry.second);
  }

  /// The first reason of all ranks goes on record in the store *before* anything is closed, so that the others, who see only closing
  /// connections, can tell why.
  void abort(const Verdict& verdict) noexcept try {
    publish(verdict);
    end(verdict);
  } catch (const std::exception&) {  // out of memory: the limit ends the others' waiting
  }

  /// Why the group failed, if a rank has said so; nothing if the store, which would know, does not answer.
  std::optional<Verdict> verdict() {
    {
      std::lock_guard lock(mutex_);
      if (!verdict_.reason.empty()) return verdict_;
    }
    if (!store_) return Verdict();
    try {
      const auto found = bounded(kVerdictLimit, [store = store_, key = key_] { return store->check({key}) ? store->get_to_str(key) : ""; });
      return found ? std::optional(Verdict::unpacked(*found)) : std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  /// A number that none of these ranks has used with another of them.
  int32_t next_tag() const { return next_tag_; }
  void use_tag(int32_t tag) { next_tag_ = std::max<int32_t>(next_tag_, tag + 1); }

  /// For a backend that somebody else holds: closing our hold on it tells nobody anything, so the store is watched for a verdict.
  void watch() {
    if (!store_ || watcher_.joinable()) return;
    watcher_ = std::jthread([this](const std::stop_token& stop) {
      std::unique_lock lock(watching_);
      while (!wake_.wait_for(lock, stop, kWatchInterval, [] { return false; }) && !stop.stop_requested()) {
        const auto found = verdict();
        if (found && !found->reason.empty()) return end(*found);
      }
    });
  }

 private:
  void expect_running() const {
    if (!verdict_.reason.empty()) throw std::runtime_error(verdict_.reason);
  }

  void publish(const Verdict& verdict) {
    {
      std::lock_guard lock(mutex_);
      if (!verdict_.reason.empty() || !store_) return;
    }
    try {
      bounded(kVerdictLimit, [store = store_, key = key_, text = verdict.packed()] { return store->compareSet(key, "", text); });
    } catch (const std::exception&) {  // then the others know only what their connections tell them
    }
  }

  void end(const Verdict& verdict) {
    std::lock_guard lock(mutex_);
    if (!verdict_.reason.empty()) return;
    verdict_ = verdict;
    for (const auto& work : receiving_) {
      try {
        work->abort();
      } catch (const std::exception&) {  // then that wait ends with its limit
      }
    }
    backend_.reset();  // closes the connections, if nobody else holds them
  }

  const int rank_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<WorkPtr> receiving_;
  Verdict verdict_;
  c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  std::atomic<int32_t> next_tag_ = kFirstTag;
  std::mutex watching_;
  std::condition_variable_any wake_;
  std::jthread watcher_;  // last: it uses the rest
};

class BackendLink final : public Link {
 public:
  /// `global[r]` is the rank in the backend of rank r in this link.
  BackendLink(std::shared_ptr<Hub> hub, std::vector<int> global, int32_t tag)
      : hub_(std::move(hub)),
        global_(std::move(global)),
        rank_(static_cast<int>(std::ranges::find(global_, hub_->rank()) - global_.begin())),
        tag_(tag) {
    hub_->use_tag(tag);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(global_.size()); }

  void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override {
    copy_own(own, from[rank_]);
    exchange([&](int) { return own; }, from, deadline);
  }

  void all_to_all(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override {
    copy_own(to[rank_], from[rank_]);
    exchange([&](int r) { return to[r]; }, from, deadline);
  }

  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override {
    const auto tag = agree_on_tag(deadline);
    std::vector<int> global;
    for (const int member : members) global.push_back(global_[member]);
    return std::make_unique<BackendLink>(hub_, std::move(global), tag);
  }

  void abort(std::string_view reason, int culprit) noexcept override { hub_->abort({.reason = std::string(reason), .culprit = culprit}); }

  int32_t agree_on_tag(Clock::time_point deadline) {
    const auto own = hub_->next_tag();
    std::vector<int32_t> tags(global_.size());
    std::vector<Bytes> from;
    for (auto& tag : tags) from.push_back(std::as_writable_bytes(std::span(&tag, 1)));
    all_gather(std::as_bytes(std::span(&own, 1)), from, deadline);
    return *std::ranges::max_element(tags);
  }

 private:
  template <class Outgoing>
  void exchange(Outgoing to, std::span<const Bytes> from, Clock::time_point deadline) {
    const NoSigpipe no_sigpipe;
    std::vector<std::pair<int, WorkPtr>> receiving, sending;
    int peer = rank_;  // the one that the call under way is about
    try {
      for (int r = 0; r < size(); r++) {
        peer = r;
        if (r == rank_) continue;
        if (!from[r].empty()) receiving.emplace_back(r, hub_->receive(from[r], global_[r], tag_));
        if (const ConstBytes bytes = to(r); !bytes.empty()) sending.emplace_back(r, hub_->send(bytes, global_[r], tag_));
      }
      for (const auto* works : {&receiving, &sending}) {
        for (const auto& [r, work] : *works) {
          peer = r;
          const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
          if (!work->wait(std::max(left, std::chrono::milliseconds(1)))) throw std::runtime_error("aborted");
        }
      }
    } catch (const std::exception& error) {
      hub_->forget(receiving);
      throw failure(peer, words_of_gloo(error), deadline);
    }
    hub_->forget(receiving);
  }

  LinkFailure failure(int peer, const std::string& how, Clock::time_point deadline) {
    const bool late = Clock::now() >= deadline;
    const auto verdict = hub_->verdict();
    if (verdict && !verdict->reason.empty()) {
      return {.kind = LinkFailure::Kind::Aborted, .ranks = {}, .reason = verdict->reason, .culprit = verdict->culprit};
    }
    if (late) return {.kind = LinkFailure::Kind::Late, .ranks = {peer}, .reason = {}};
    auto reason = fmt::format("has closed its connection or died ({})", how);
    if (!verdict && global_[peer] != 0) {
      reason += "; the store can't be reached either: if rank 0 of the world keeps it, that rank is gone";
    }
    return {.kind = LinkFailure::Kind::Gone, .ranks = {peer}, .reason = std::move(reason)};
  }

  std::shared_ptr<Hub> hub_;
  const std::vector<int> global_;
  const int rank_;
  const int32_t tag_;
};

std::vector<int> all_ranks(const c10d::Backend& backend) {
  std::vector<int> ranks(static_cast<size_t>(backend.getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// The hub of a backend that belongs to the program: one, however often the program joins it, for as long as links over it exist.
std::shared_ptr<Hub> shared_hub(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store) {
  static std::mutex mutex;
  static std::map<c10d::Backend*, std::pair<std::weak_ptr<Hub>, int>> hubs;
  std::lock_guard lock(mutex);
  auto& [known, joined] = hubs[backend.get()];
  auto hub = known.lock();
  if (!hub) {
    hub = std::make_shared<Hub>(backend, store, fmt::format("tessera/verdict/{}", joined++));
    known = hub;
    hub->watch();
  }
  return hub;
}

}  // namespace

std::unique_ptr<Link> gloo_link(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options) {
  const NoSigpipe no_sigpipe;
  try {
    const auto settings = c10d::ProcessGroupGloo::Options::create(options.start_limit);
    settings->threads = 1;  // point-to-point messages need none of them
    if (const auto interface = env("GLOO_SOCKET_IFNAME")) {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(*interface));
    } else if (!options.address.empty()) {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
    } else {
      settings->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
    }
    const auto connections = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
    const auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(connections, rank, size, settings);
    return std::make_unique<BackendLink>(std::make_shared<Hub>(backend, store, "verdict"), all_ranks(*backend), kFirstTag);
  } catch (const std::exception& error) {
    throw CommError(
        fmt::format("rank {}: gloo can't connect the {} ranks within {} s: {}. Can the hosts reach each other? "
                    "GLOO_SOCKET_IFNAME names the network interface to use",
                    rank, size, std::chrono::duration<double>(options.start_limit).count(), words_of_gloo(error)));
  }
}

std::unique_ptr<Link> backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                                   std::chrono::milliseconds start_limit) {
  const auto hub = shared_hub(backend, store);
  // Messages of the first tag are for agreeing on another one, which no other world over this backend uses.
  BackendLink meeting(hub, all_ranks(*backend), kFirstTag);
  try {
    return std::make_unique<BackendLink>(hub, all_ranks(*backend), meeting.agree_on_tag(Clock::now() + start_limit));
  } catch (const LinkFailure& failure) {
    throw CommError(fmt::format("rank {} can't join the process group: {} {}", backend->getRank(),
                                failure.ranks.empty() ? std::string("it was broken off:") : name_ranks(failure.ranks),
                                failure.kind == LinkFailure::Kind::Late ? "did not join too" : failure.reason));
  }
}

}  // namespace tessera
