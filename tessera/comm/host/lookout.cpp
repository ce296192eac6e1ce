#include "tessera/comm/host/lookout.h"

#include <fmt/format.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera {
namespace {

constexpr auto kLookEvery = std::chrono::seconds(1);
constexpr auto kPatience = std::chrono::seconds(3);  // with ranks that have not answered
constexpr auto kPollAnswers = std::chrono::milliseconds(20);

std::atomic<int> signals_seen = 0;

void note_signal(int) {
  signals_seen.fetch_add(1);
}

/// Takes SIGUSR2, unless the program wants it for itself.
void take_signal() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction now = {};
    if (::sigaction(SIGUSR2, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
    now.sa_handler = note_signal;
    now.sa_flags = SA_RESTART;
    ::sigaction(SIGUSR2, &now, nullptr);
  });
}

std::string answer_key(std::string_view incident, int rank) {
  return fmt::format("flight/{}/{}", incident, rank);
}
std::string request_key(int64_t number) {
  return fmt::format("flight/request/{}", number);
}

}  // namespace

/// What the thread uses. It outlives the Lookout if the store does not answer any more.
struct Lookout::Watch {
  StorePtr store;
  Identity identity;
  std::shared_ptr<const FlightRecorder> recorder;
  std::mutex mutex;
  std::condition_variable ended;
  bool ends = false, has_ended = false;

  void answer(const std::string& incident) const { store->set(answer_key(incident, identity.rank), recorder->to_json()); }

  void run() {
    int64_t next = 1;
    int signals = signals_seen;
    for (std::unique_lock lock(mutex); !ends; ended.wait_for(lock, kLookEvery, [&] { return ends; })) {
      lock.unlock();
      while (store->check({request_key(next)})) answer(store->get_to_str(request_key(next++)));
      // Of the worlds of a process, which may be several, one answers the signal.
      if (int seen = signals_seen; seen != signals && signals_seen.compare_exchange_strong(seen, signals)) {
        report(fmt::format("signal-{}-{}", identity.rank, next), "SIGUSR2");
      }
      lock.lock();
    }
  }

  void report(std::string_view incident, std::string_view reason) const {
    const auto name = std::string(incident);
    answer(name);
    if (store->add("flight/claims/" + name, 1) != 1) return;
    store->set(request_key(store->add("flight/requests", 1)), name);
    std::map<int, std::string> answers;
    const auto end = FlightRecorder::Clock::now() + kPatience;
    for (bool late = false; !late && static_cast<int>(answers.size()) < identity.world_size;) {
      late = FlightRecorder::Clock::now() >= end;
      for (int rank = 0; rank < identity.world_size; rank++) {
        if (answers.contains(rank) || !store->check({answer_key(incident, rank)})) continue;
        answers[rank] = store->get_to_str(answer_key(incident, rank));
      }
      std::this_thread::sleep_for(kPollAnswers);
    }
    log(LogLevel::Error, fmt::format("{}. Where the ranks are:\n{}", reason, flight_report(answers, identity.world_size)));
  }
};

Lookout::Lookout(StorePtr store, const Identity& identity, std::shared_ptr<const FlightRecorder> recorder)
    : watch_(std::make_shared<Watch>()) {
  take_signal();
  watch_->store = std::move(store);
  watch_->identity = identity;
  watch_->recorder = std::move(recorder);
  std::thread([watch = watch_] {
    try {
      watch->run();
    } catch (const std::exception& error) {  // rank 0 keeps the store, and has ended
      log(LogLevel::Debug, fmt::format("no more flight reports: {}", first_line(error)));
    }
    const std::lock_guard lock(watch->mutex);
    watch->has_ended = true;
    watch->ended.notify_all();
  }).detach();
}

Lookout::~Lookout() {
  std::unique_lock lock(watch_->mutex);
  watch_->ends = true;
  watch_->ended.notify_all();
  watch_->ended.wait_for(lock, kPatience, [&] { return watch_->has_ended; });
}

void Lookout::report(std::string_view incident, std::string_view reason) const noexcept {
  try {
    watch_->report(incident, reason);
  } catch (const std::exception& error) {
    log(LogLevel::Debug, fmt::format("no flight report: {}", first_line(error)));
  }
}

}  // namespace tessera
