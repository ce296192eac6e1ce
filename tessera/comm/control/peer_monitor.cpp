#include "tessera/comm/control/peer_monitor.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/control/flight_report.h"
#include "tessera/comm/trace.h"

namespace tessera {
namespace {

using Time = std::chrono::steady_clock;

constexpr auto kPollRequests = std::chrono::seconds(1);
constexpr auto kPatience = std::chrono::seconds(3);  // how long to wait for ranks to answer
constexpr auto kMostPatience = kPatience + kPollRequests;
constexpr auto kPollAnswers = std::chrono::milliseconds(20);

std::atomic<int> signals_seen = 0;

void note_signal(int) {
  signals_seen.fetch_add(1);
}

/// Handles SIGUSR2, unless the program does.
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

constexpr auto kSignal = "signal-";  // how the name of an incident begins if a signal has asked
constexpr auto kRequests = "flight/requests";  // the key under which the store counts requests

std::string request_key(int64_t number) {
  return fmt::format("flight/request/{}", number);
}
std::string answer_key(const std::string& incident, int rank) {
  return fmt::format("flight/{}/{}", incident, rank);
}

}  // namespace

/// The state of the thread. It outlives the PeerMonitor if the store does not answer any more.
struct PeerMonitor::State {
  struct Incident {
    std::string name, reason;  // an empty reason: the ranks are asked, but nothing is logged
  };

  StorePtr store;
  Identity identity;
  std::shared_ptr<const Record> record;
  std::set<int64_t> answered = {};  // numbers of the requests that this rank has answered
  std::set<std::string> told = {};  // the incidents of these requests

  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  std::vector<Incident> incidents = {};  // the incidents that the thread has not investigated yet
  std::set<std::string> reported = {};
  std::map<std::string, std::map<int, std::string>> answers = {};  // the answers of all ranks, by incident
  bool ends = false, has_ended = false;

  /// Hands an incident to the thread, and returns when its name is in `done`, or after some seconds.
  template <class Done>
  void wait_for(const Incident& incident, const Done& done) {
    std::unique_lock lock(mutex);
    if (done.contains(incident.name)) return;
    incidents.push_back(incident);
    changed.notify_all();
    changed.wait_for(lock, kMostPatience, [&] { return done.contains(incident.name) || has_ended; });
  }

  /// The body of the thread.
  void run() {
    std::unique_lock lock(mutex);
    while (!ends) {
      const auto now = std::exchange(incidents, {});
      lock.unlock();
      for (const auto& incident : now) investigate(incident);
      answer_requests();
      lock.lock();
      for (const auto& incident : now) {
        if (!incident.reason.empty()) reported.insert(incident.name);
      }
      changed.notify_all();
      changed.wait_for(lock, kPollRequests, [&] { return ends || !incidents.empty(); });
    }
  }

  void answer_requests() {
    const auto requests = store->add(kRequests, 0);
    for (int64_t number = 1; number <= requests; number++) {
      if (answered.contains(number) || !store->check({request_key(number)})) continue;
      answer(store->get_to_str(request_key(number)));
      answered.insert(number);
    }
    // If the process has several worlds, one of them answers the signal. Ranks that get it at the same time make one report: answer() drops
    // the signal of a rank that looks later than another one.
    if (signals_seen.exchange(0) > 0) investigate({.name = fmt::format("{}{}", kSignal, requests), .reason = "SIGUSR2"});
  }

  void answer(const std::string& incident) {
    if (!told.insert(incident).second) return;
    const bool is_signal = incident.starts_with(kSignal), writes = is_signal || !record->run.empty();
    if (is_signal) signals_seen = 0;
    const auto say = [&](const std::string& trace) {
      store->set(answer_key(incident, identity.rank), flight_answer(record->snapshot(), trace));
    };
    say(writes ? trace_path(*record).string() : "");  // before it is written, because others wait for the answer for some seconds only
    if (!writes) return;
    try {
      write_trace(*record);
    } catch (const std::exception& error) {
      say(first_line(error));
    }
  }

  /// Asks all ranks for their records. The first rank that reports the incident logs the text, and other ranks that report it wait until
  /// the text is logged.
  void investigate(const Incident& incident) {
    const auto end = Time::now() + kPatience;
    const auto& known = ask(incident.name, end);
    if (incident.reason.empty()) return;
    const auto done = "flight/done/" + incident.name;
    if (store->add("flight/claims/" + incident.name, 1) != 1) {
      while (!store->check({done}) && Time::now() < end) std::this_thread::sleep_for(kPollAnswers);
      return;
    }
    log(LogLevel::Error, "{}. Where the ranks are:\n{}", incident.reason, flight_report(known, identity.world_size));
    store->set(done, std::string("1"));
  }

  /// Returns the ranks' answers about an incident. Asks them once.
  const std::map<int, std::string>& ask(const std::string& incident, Time::time_point end) {
    {
      const std::lock_guard lock(mutex);
      if (const auto known = answers.find(incident); known != answers.end()) return known->second;
    }
    answer(incident);
    if (store->add("flight/asked/" + incident, 1) == 1) store->set(request_key(store->add(kRequests, 1)), incident);
    std::map<int, std::string> found;
    for (bool late = false; !late && std::ssize(found) < identity.world_size;) {
      late = Time::now() >= end;
      for (int rank = 0; rank < identity.world_size; rank++) {
        if (found.contains(rank) || !store->check({answer_key(incident, rank)})) continue;
        found[rank] = store->get_to_str(answer_key(incident, rank));
      }
      if (std::ssize(found) < identity.world_size) std::this_thread::sleep_for(kPollAnswers);
    }
    const std::lock_guard lock(mutex);
    return answers[incident] = std::move(found);
  }
};

PeerMonitor::PeerMonitor(const StorePtr& store, const Identity& identity, std::shared_ptr<const Record> record)
    : state_(std::make_shared<State>()) {
  take_signal();
  state_->store = store->clone();  // a connection of its own, so that neither the program nor the thread waits for a request of the other
  state_->identity = identity;
  state_->record = std::move(record);
  std::thread([state = state_] {
    try {
      state->run();
    } catch (const std::exception&) {  // the store is gone: rank 0, which keeps it, has ended
    }
    const std::lock_guard lock(state->mutex);
    state->has_ended = true;
    state->changed.notify_all();
  }).detach();
}

PeerMonitor::~PeerMonitor() {
  std::unique_lock lock(state_->mutex);
  state_->ends = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kMostPatience, [&] { return state_->has_ended; });
}

void PeerMonitor::report(std::string_view incident, std::string_view reason) const noexcept {
  state_->wait_for({.name = std::string(incident), .reason = std::string(reason)}, state_->reported);
}

std::map<int, std::string> PeerMonitor::ask(std::string_view incident) const {
  const State::Incident asked{.name = std::string(incident), .reason = {}};
  state_->wait_for(asked, state_->answers);
  const std::lock_guard lock(state_->mutex);
  const auto known = state_->answers.find(asked.name);
  return known == state_->answers.end() ? std::map<int, std::string>() : known->second;
}

}  // namespace tessera
