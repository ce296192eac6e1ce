// BackendHub: the state that all links over one c10d backend share, namely the backend, the tags of messages, and the verdict, which says
// why the links failed.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "tessera/comm/host/connection_watch.h"
#include "tessera/comm/host/link.h"

namespace tessera {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

/// When one link over a backend fails, all of them do, because gloo then closes every connection. Links may use the hub from different
/// threads.
class BackendHub {
 public:
  /// Far above the small tags that the program itself uses for messages over the same backend.
  static constexpr int32_t kFirstTag = 0x54000000;

  /// `store`, which may be null, keeps the verdict under `key`. `connections`, which may be null, watches those of the backend.
  BackendHub(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, std::string key,
             std::shared_ptr<ConnectionWatch> connections = nullptr);

  int rank() const { return rank_; }

  /// receive() and send() throw the verdict's reason once there is a verdict. The caller keeps the bytes until the work has ended.
  BackendWork receive(Bytes bytes, int peer, int32_t tag);
  BackendWork send(ConstBytes bytes, int peer, int32_t tag);
  /// Forgets works of receive() that have ended, because abort() must end only works that still run.
  void forget(std::span<const std::pair<int, BackendWork>> works);

  /// Publishes the verdict in the store, and only then closes connections: other ranks that see a connection close find the reason in the
  /// store. Of several ranks' verdicts, only the first counts.
  void abort(const LinkFailure& verdict) noexcept;

  /// The first verdict of all ranks; its reason is empty if no rank has failed yet. Nothing if the store does not answer.
  std::optional<LinkFailure> verdict();

  /// Tells the other ranks to wait for this rank's verdict. After a time-out, this rank needs a while to find out who is missing, and its
  /// connections close in the meantime.
  void announce_verdict();
  /// Like verdict(), but if a rank has announced a verdict, waits for it.
  std::optional<LinkFailure> announced_verdict();

  /// The failure of connections that were ended because a host is silent.
  std::optional<LinkFailure> silence() const { return connections_ ? connections_->failure() : std::nullopt; }

  /// A tag above all tags that this rank has used. So the largest next_tag() of several ranks is unused on all of them.
  int32_t next_tag() const { return next_tag_; }
  /// A tag that no other call on any rank gets, because threads may split several links at the same time. Needs a store.
  int32_t new_tag(Clock::time_point deadline) const;
  bool has_store() const { return store_ != nullptr; }
  void use_tag(int32_t tag);

  /// Polls the store for a verdict in a thread. Needed if the program holds the backend too: then an abort on another rank closes no
  /// connection. Calls `then` after a verdict.
  void watch(std::function<void()> then = [] {});

 private:
  void expect_running() const;
  void publish(const LinkFailure& verdict);
  void end(const LinkFailure& verdict);

  const int rank_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::shared_ptr<ConnectionWatch> connections_;
  std::vector<BackendWork> receiving_;
  LinkFailure verdict_{.kind = LinkFailure::Kind::Aborted};  // its reason is empty until a rank has aborted
  c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  std::atomic<int32_t> next_tag_ = kFirstTag;
  std::mutex watching_;
  std::condition_variable_any wake_;
  std::jthread watcher_;  // last, because the thread uses the members above
};

/// Returns the hub of a backend that belongs to the program. All links over the backend share one hub, however often the program calls
/// init() with it.
std::shared_ptr<BackendHub> shared_hub(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store);

/// The first line of an exception of c10d or gloo, without the stack trace that follows. cmake/tsan.supp names this function: the text may
/// come from gloo's thread, ordered by a lock that the thread sanitizer does not see.
std::string backend_error_text(const std::exception& error);

}  // namespace tessera
