#include "tessera/comm/gloo/gloo_link.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

// Tags of messages that others send over the same backend are small.
constexpr int32_t kFirstTag = 0x54000000;
constexpr auto kVerdictLimit = std::chrono::seconds(2);

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

/// Why the group failed, in the words of the rank that noticed first. The others see only that connections close.
class Verdict {
 public:
  explicit Verdict(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {
    if (store_) store_ = store_->clone();  // a connection of its own: another thread may be waiting in the store
    if (store_) store_->setTimeout(kVerdictLimit);
  }

  /// Puts `reason` on record, unless there is one already.
  void settle(const std::string& reason) noexcept {
    try {
      if (store_) store_->compareSet(kKey, "", reason);
    } catch (const std::exception&) {  // then the others know only what their connections tell them
    }
  }

  struct Found {
    bool store_answers = true;
    std::string reason = {};
  };
  Found look() noexcept {
    try {
      if (store_ && store_->check({kKey})) return {.reason = store_->get_to_str(kKey)};
      return {};
    } catch (const std::exception&) {
      return {.store_answers = false};
    }
  }

 private:
  static constexpr const char* kKey = "verdict";
  c10::intrusive_ptr<c10d::Store> store_;
};

/// The first line of what c10d or gloo says: the rest is a stack trace. (A function of its own, so that the thread sanitizer can be told
/// about it: the text may come from gloo's thread, ordered by a lock that the sanitizer does not see.)
[[gnu::noinline]] std::string words_of_gloo(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

at::Tensor as_tensor(ConstBytes bytes) {
  return at::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

class BackendLink final : public Link {
 public:
  /// `global[r]` is the rank in the backend of rank r in this link.
  BackendLink(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, std::vector<int> global, int rank,
              std::shared_ptr<int32_t> next_tag)
      : backend_(std::move(backend)),
        store_(std::move(store)),
        verdict_(store_),
        global_(std::move(global)),
        rank_(rank),
        tag_(*next_tag),
        next_tag_(std::move(next_tag)) {
    ++*next_tag_;
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(global_.size()); }

  void gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override {
    copy_own(own, from[rank_]);
    exchange([&](int) { return own; }, from, deadline);
  }

  void transpose(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override {
    copy_own(to[rank_], from[rank_]);
    exchange([&](int r) { return to[r]; }, from, deadline);
  }

  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override {
    // A tag that none of these ranks has used with another of them.
    std::vector<int32_t> tags(global_.size());
    std::vector<Bytes> from;
    for (auto& tag : tags) from.push_back(std::as_writable_bytes(std::span(&tag, 1)));
    gather(std::as_bytes(std::span(next_tag_.get(), 1)), from, deadline);
    *next_tag_ = *std::ranges::max_element(tags);

    std::vector<int> global;
    std::string name;
    for (const int member : members) {
      global.push_back(global_[member]);
      name += fmt::format("{}.", global_[member]);
    }
    const auto position = static_cast<int>(std::ranges::find(members, rank_) - members.begin());
    auto store = store_;
    if (store) store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("split{}/{}", *next_tag_ - kFirstTag, name), store);
    return std::make_unique<BackendLink>(backend_, std::move(store), std::move(global), position, next_tag_);
  }

  void abort(std::string_view reason) noexcept override {
    verdict_.settle(std::string(reason));
    std::lock_guard lock(mutex_);
    aborted_ = true;
    for (const auto& [peer, work] : receiving_) {
      try {
        work->abort();
      } catch (const std::exception&) {  // then this rank's own wait ends with its limit
      }
    }
    backend_.reset();  // closes the connections, if nobody else holds them: the others wake up and read the verdict
  }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  template <class Outgoing>
  void exchange(Outgoing to, std::span<const Bytes> from, Clock::time_point deadline) {
    const NoSigpipe no_sigpipe;
    std::vector<std::pair<int, WorkPtr>> sending;
    int peer = -1;  // the one that the call under way is about
    try {
      {
        std::lock_guard lock(mutex_);
        if (aborted_) throw std::runtime_error("aborted");
        for (int r = 0; r < size(); r++) {
          peer = r;
          if (r == rank_) continue;
          if (!from[r].empty()) {
            std::vector<at::Tensor> target = {as_tensor(from[r])};
            receiving_.emplace_back(r, backend_->recv(target, global_[r], tag_));
          }
          if (const ConstBytes bytes = to(r); !bytes.empty()) {
            std::vector<at::Tensor> source = {as_tensor(bytes)};
            sending.emplace_back(r, backend_->send(source, global_[r], tag_));
          }
        }
      }
      // Only exchange() changes the list, so reading it needs no lock.
      for (const auto* works : {&receiving_, &sending}) {
        for (const auto& [r, work] : *works) {
          peer = r;
          const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
          if (!work->wait(std::max(left, std::chrono::milliseconds(1)))) throw std::runtime_error("aborted");
        }
      }
    } catch (const std::exception& error) {
      forget_receiving();
      throw failure(peer, words_of_gloo(error), deadline);
    }
    forget_receiving();
  }

  void forget_receiving() {
    std::lock_guard lock(mutex_);
    receiving_.clear();
  }

  LinkFailure failure(int peer, const std::string& how, Clock::time_point deadline) {
    const bool late = Clock::now() >= deadline;
    const auto verdict = verdict_.look();
    if (!verdict.reason.empty()) return {.kind = LinkFailure::Kind::Aborted, .ranks = {}, .reason = verdict.reason};
    if (late) return {.kind = LinkFailure::Kind::Late, .ranks = {peer}, .reason = {}};
    auto reason = fmt::format("has closed its connection or died ({})", how);
    if (!verdict.store_answers && peer != 0) reason += "; the store can't be reached either: if rank 0 keeps it, rank 0 is gone";
    return {.kind = LinkFailure::Kind::Gone, .ranks = {peer}, .reason = std::move(reason)};
  }

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<std::pair<int, WorkPtr>> receiving_;
  bool aborted_ = false;
  c10::intrusive_ptr<c10d::Store> store_;
  Verdict verdict_;
  const std::vector<int> global_;
  const int rank_;
  const int32_t tag_;
  std::shared_ptr<int32_t> next_tag_;  // of all links over this backend
};

std::unique_ptr<Link> whole_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store) {
  std::vector<int> ranks(static_cast<size_t>(backend->getSize()));
  for (size_t r = 0; r < ranks.size(); r++) ranks[r] = static_cast<int>(r);
  return std::make_unique<BackendLink>(backend, store, std::move(ranks), backend->getRank(), std::make_shared<int32_t>(kFirstTag));
}

}  // namespace

std::unique_ptr<Link> gloo_link(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options) {
  const NoSigpipe no_sigpipe;
  const auto settings = c10d::ProcessGroupGloo::Options::create(options.start_limit);
  settings->threads = 1;  // point-to-point messages need none of them
  if (const auto interface = env("GLOO_SOCKET_IFNAME")) {
    settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(*interface));
  } else if (!options.address.empty()) {
    settings->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  } else {
    settings->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  }
  try {
    const auto connections = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
    return whole_link(c10::make_intrusive<c10d::ProcessGroupGloo>(connections, rank, size, settings), store);
  } catch (const std::exception& error) {
    throw CommError(
        fmt::format("rank {}: gloo can't connect the {} ranks within {} s: {}. Can the hosts reach each other? "
                    "GLOO_SOCKET_IFNAME names the network interface to use",
                    rank, size, std::chrono::duration<double>(options.start_limit).count(), words_of_gloo(error)));
  }
}

std::unique_ptr<Link> backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store) {
  return whole_link(backend, store);
}

}  // namespace tessera
