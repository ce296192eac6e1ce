#include "tessera/train/stop_signal.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <mutex>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

/// A signal that this process watches. It has several owners (StopSignal objects) if ranks are threads.
struct Watched {
  std::atomic<int> owners = 0;
  struct sigaction before = {};
};

constexpr int64_t kSameEvent = 1'000'000'000;  // nanoseconds within which signals count as one: if all processes of a job get a signal and
                                               // pass it on, it comes several times

std::mutex owners_mutex;
std::array<Watched, NSIG> watched;
std::atomic<int> arrived = 0;
std::atomic<int64_t> arrived_at = 0;  // when the first signal came; 0 if none has
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);  // so a signal handler may use them

int64_t now() {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void note_signal(int);

bool is_ours(int signal) {
  struct sigaction now = {};
  return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == note_signal;
}

void give_back(int signal) {
  if (is_ours(signal)) ::sigaction(signal, &watched[static_cast<size_t>(signal)].before, nullptr);
}

void note_signal(int signal) {
  const int error = errno;
  if (arrived_at == 0) {
    arrived_at = now();
    arrived++;
  } else if (now() > arrived_at + kSameEvent) {
    for (int each = 1; each < NSIG; each++) {
      if (watched[static_cast<size_t>(each)].owners > 0) give_back(each);
    }
    ::raise(signal);  // delivered when this handler returns
  }
  errno = error;
}

void take(int signal) {
  auto& each = watched[static_cast<size_t>(signal)];
  if (!is_ours(signal)) {
    struct sigaction ours = {};
    ours.sa_handler = note_signal;
    ours.sa_flags = SA_RESTART;
    ::sigaction(signal, nullptr, &each.before);
    ::sigaction(signal, &ours, nullptr);
  }
  each.owners++;
}

}  // namespace

StopSignal::StopSignal(Communicator world, StopOptions options) : world_(std::move(world)), options_(std::move(options)), before_(arrived) {
  for (const int signal : options_.signals) {
    struct sigaction now = {};
    if (signal < 1 || signal >= NSIG || signal == SIGKILL || signal == SIGSTOP || ::sigaction(signal, nullptr, &now) != 0) {
      throw UsageError("no program can handle signal {}; choose another, such as SIGTERM, SIGUSR1, SIGUSR2, SIGINT or SIGHUP", signal);
    }
  }
  const std::lock_guard lock(owners_mutex);
  if (std::ranges::all_of(watched, [](const Watched& each) { return each.owners == 0; })) arrived_at = 0;
  for (const int signal : options_.signals) take(signal);
}

StopSignal::~StopSignal() {
  const std::lock_guard lock(owners_mutex);
  for (const int signal : options_.signals) {
    if (--watched[static_cast<size_t>(signal)].owners == 0) give_back(signal);
  }
}

bool StopSignal::requested() {
  if (requested_) return true;  // it is set on all ranks at once, so no exchange is needed
  requested_ = world_.extremes(arrived != before_ ? 1 : 0, {.unit = "stop"}).most != 0;
  return requested_;
}

}  // namespace tessera::train
