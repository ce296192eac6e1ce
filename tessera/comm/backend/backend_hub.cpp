#include "tessera/comm/backend/backend_hub.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera {
namespace {

constexpr auto kVerdictLimit = std::chrono::seconds(2);
constexpr auto kAnnounced = std::chrono::seconds(10);  // how long to wait for an announced verdict
constexpr auto kAnnouncement = "/announced";
constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
constexpr auto kWatchInterval = std::chrono::milliseconds(500);

at::Tensor as_tensor(ConstBytes bytes) {
  return at::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

/// Returns the store's answer, or nothing if the store fails or does not answer in time. Then this rank knows only what its connections
/// tell it.
template <class Question>
auto ask(const StorePtr& store, Question question, std::chrono::milliseconds limit = kVerdictLimit) noexcept
    -> std::optional<decltype(question(*store))> try {
  return bounded(limit, [=] { return question(*store); });
} catch (const std::exception&) {
  return std::nullopt;
}

/// Writes a verdict as the store keeps it: the rank, a blank, the reason.
std::string packed(const LinkFailure& verdict) {
  return fmt::format("{} {}", verdict.culprit, verdict.reason);
}

LinkFailure unpacked(const std::string& text) {
  LinkFailure verdict{.kind = LinkFailure::Kind::Aborted};
  const auto blank = text.find(' ');
  if (blank == std::string::npos) return verdict;
  verdict.reason = text.substr(blank + 1);
  std::from_chars(text.data(), text.data() + blank, verdict.culprit);
  return verdict;
}

}  // namespace

BackendHub::BackendHub(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store, std::string key,
                       std::shared_ptr<ConnectionWatch> connections)
    : rank_(backend->getRank()),
      backend_(std::move(backend)),
      connections_(std::move(connections)),
      store_(std::move(store)),
      key_(std::move(key)) {
  if (store_) store_ = store_->clone();  // a connection of its own, because other threads may be waiting on the given one
}

BackendWork BackendHub::receive(Bytes bytes, int peer, int32_t tag) {
  std::lock_guard lock(mutex_);
  expect_running();
  std::vector<at::Tensor> target = {as_tensor(bytes)};
  auto work = backend_->recv(target, peer, tag);
  receiving_.push_back(work);
  return work;
}

BackendWork BackendHub::send(ConstBytes bytes, int peer, int32_t tag) {
  std::lock_guard lock(mutex_);
  expect_running();
  std::vector<at::Tensor> source = {as_tensor(bytes)};
  return backend_->send(source, peer, tag);
}

void BackendHub::forget(std::span<const std::pair<int, BackendWork>> works) {
  std::lock_guard lock(mutex_);
  for (const auto& entry : works) std::erase(receiving_, entry.second);
}

void BackendHub::abort(const LinkFailure& verdict) noexcept try {
  publish(verdict);
  end(verdict);
} catch (const std::exception&) {  // out of memory: the other ranks wait until their time limit
}

std::optional<LinkFailure> BackendHub::verdict() {
  {
    std::lock_guard lock(mutex_);
    if (!verdict_.reason.empty()) return verdict_;
  }
  if (!store_) return unpacked("");
  const auto found = ask(store_, [key = key_](auto& store) { return store.check({key}) ? store.get_to_str(key) : std::string(); });
  return found ? std::optional(unpacked(*found)) : std::nullopt;
}

void BackendHub::announce_verdict() {
  if (store_) ask(store_, [key = key_ + kAnnouncement](auto& store) { return store.add(key, 1); });
}

std::optional<LinkFailure> BackendHub::announced_verdict() {
  const auto end = Clock::now() + kAnnounced;
  for (;;) {
    auto found = verdict();
    if (!found || !found->reason.empty() || !store_ || Clock::now() >= end) return found;
    const auto announced = ask(store_, [key = key_ + kAnnouncement](auto& store) { return store.check({key}); });
    if (!announced.value_or(false)) return found;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

int32_t BackendHub::new_tag(Clock::time_point deadline) const {
  const auto number = ask(store_, [key = key_ + "/tags"](auto& store) { return store.add(key, 1); }, time_until(deadline));
  if (!number) throw CommError("rank {}: the store does not answer, so no group can be made", rank_);
  return kFirstTag + static_cast<int32_t>(*number);
}

void BackendHub::use_tag(int32_t tag) {
  next_tag_ = std::max<int32_t>(next_tag_, tag + 1);
}

void BackendHub::watch(std::function<void()> then) {
  if (!store_ || watcher_.joinable()) return;
  watcher_ = std::jthread([this, then = std::move(then)](const std::stop_token& stop) {
    std::unique_lock lock(watching_);
    while (!wake_.wait_for(lock, stop, kWatchInterval, [] { return false; }) && !stop.stop_requested()) {
      const auto found = verdict();
      if (!found || found->reason.empty()) continue;
      end(*found);
      return then();
    }
  });
}

void BackendHub::expect_running() const {
  if (!verdict_.reason.empty()) throw std::runtime_error(verdict_.reason);
}

void BackendHub::publish(const LinkFailure& verdict) {
  {
    std::lock_guard lock(mutex_);
    if (!verdict_.reason.empty() || !store_) return;
  }
  ask(store_, [key = key_, text = packed(verdict)](auto& store) { return store.compareSet(key, "", text); });
}

void BackendHub::end(const LinkFailure& verdict) {
  c10::intrusive_ptr<c10d::Backend> ended;  // destroyed after the lock is released, because the destructor waits for the backend's own threads
  std::lock_guard lock(mutex_);
  if (!verdict_.reason.empty()) return;
  verdict_ = verdict;
  for (const auto& work : receiving_) {
    try {
      work->abort();
    } catch (const std::exception&) {  // the receive then ends at its time limit
    }
  }
  ended = std::move(backend_);  // its destructor closes the connections, unless somebody else holds the backend
}

std::shared_ptr<BackendHub> shared_hub(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store) {
  struct Known {
    c10::weak_intrusive_ptr<c10d::Backend> backend;  // keeps the address from being used again
    std::weak_ptr<BackendHub> hub;
  };
  static std::mutex mutex;
  static auto& hubs = *new std::map<c10d::Backend*, Known>;  // never destroyed, because libtorch's static objects may be destroyed first
  std::lock_guard lock(mutex);
  std::erase_if(hubs, [](const auto& entry) { return entry.second.hub.expired(); });
  if (const auto known = hubs.find(backend.get()); known != hubs.end()) {
    if (auto hub = known->second.hub.lock()) return hub;
  }
  const int round = store ? next_round(store, backend->getRank()) : 0;
  auto hub = std::make_shared<BackendHub>(backend, store, fmt::format("tessera/verdict/{}", round));
  hubs.insert_or_assign(backend.get(), Known{.backend = c10::weak_intrusive_ptr<c10d::Backend>(backend), .hub = hub});
  hub->watch();
  return hub;
}

[[gnu::noinline]] std::string backend_error_text(const std::exception& error) {
  return first_line(error);
}

}  // namespace tessera
