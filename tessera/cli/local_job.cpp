#include "tessera/cli/local_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

constexpr auto kLastWords = std::chrono::seconds(1);  // after a failure, before SIGTERM
constexpr auto kEnough = std::chrono::seconds(3);     // after that SIGTERM, before SIGKILL
constexpr auto kGrace = std::chrono::seconds(10);     // after a relayed signal, before SIGKILL, because a rank may want to save its work

std::string prefix(int rank, int target) {
  const auto text = fmt::format("[rank {}] ", rank);
  if (::isatty(target) == 0 || env("TERM").value_or("dumb") == "dumb") return text;
  // Overwrites the progress bar that rank 0 may be drawing on this terminal. Rank 0 will draw it again.
  const std::string clear = "\r\033[K";
  if (env("NO_COLOR")) return clear + text;
  constexpr std::array kColours = {36, 33, 35, 32, 34, 31};
  return clear + fmt::format("\033[{}m{}\033[0m", kColours[static_cast<size_t>(rank) % kColours.size()], text);
}

}  // namespace

LocalJob::HeldSignals::HeldSignals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGCHLD}) {
    struct sigaction now {};
    // If launch was started with a signal ignored (nohup), the ranks must ignore it too.
    if (::sigaction(signal, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) ::sigaddset(&set, signal);
  }
  incoming = Fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!incoming) throw IoError(fmt::format("no signalfd: {}", std::strerror(errno)));
  ::pthread_sigmask(SIG_BLOCK, &set, &before);
}

LocalJob::HeldSignals::~HeldSignals() {
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

LocalJob::LocalJob(const std::vector<std::string>& command, int ranks, const std::map<std::string, std::string>& environment)
    : watchdog_(ranks) {
  ::signal(SIGPIPE, SIG_IGN);  // the ranks go on if the reader of our output ends
  for (int rank = 0; rank < ranks; rank++) start(command, environment);
}

void LocalJob::start(const std::vector<std::string>& command, std::map<std::string, std::string> environment) {
  const int rank = static_cast<int>(ranks_.size());
  environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
  environment[FailureRecord::kVariable] = failures_.path();
  // Rank 0 writes directly to a terminal, because progress bars check whether they write to one.
  const bool direct = rank == 0 && ::isatty(STDOUT_FILENO) != 0;
  Pipe out, err;
  const auto prepare = [&] {
    ::setpgid(0, 0);
    // The rank is not in the terminal's foreground group, so these signals would stop it when it uses the terminal.
    ::signal(SIGPIPE, SIG_DFL);
    ::signal(SIGTTIN, SIG_IGN);
    ::signal(SIGTTOU, SIG_IGN);
    ::pthread_sigmask(SIG_SETMASK, &signals_.before, nullptr);
    if (rank != 0) ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    if (!direct) ::dup2(out.write.get(), STDOUT_FILENO);
    ::dup2(err.write.get(), STDERR_FILENO);
  };
  ranks_.push_back({.process = Process(command, environment, Process::Output::Inherit, prepare), .output = {}, .status = {}});
  auto& started = ranks_.back();
  watchdog_.watch(rank, started.process.pid());
  if (!direct) started.output.emplace_back(std::move(out.read), STDOUT_FILENO, prefix(rank, STDOUT_FILENO));
  started.output.emplace_back(std::move(err.read), STDERR_FILENO, prefix(rank, STDERR_FILENO));
}

Ending LocalJob::run() {
  while (runs()) {
    wait_for_news();
    take_signals();
    pump();
    reap();
    act();
  }
  while (pump()) {
  }
  if (ending_.failed_rank) {
    ending_.failed_rank = culprit_behind(*ending_.failed_rank);
    const auto& failed = ranks_[static_cast<size_t>(*ending_.failed_rank)];
    ending_.status = *failed.status;
    ending_.last_words.assign(failed.output.back().last_lines().begin(), failed.output.back().last_lines().end());
  } else if (interrupted_ && std::ranges::any_of(ranks_, [](const auto& rank) { return *rank.status != 0; })) {
    ending_.status = 128 + *interrupted_;
  }
  return ending_;
}

/// The rank because of which this one failed, as the failure record has it: that one may end later than this one.
int LocalJob::culprit_behind(int rank) const {
  const int culprit = failures_.culprit_of(rank).value_or(rank);
  if (culprit < 0 || culprit >= static_cast<int>(ranks_.size())) return rank;
  // A rank that the launcher has stopped, or that ended without an error, is not the culprit.
  const bool failed =
      *ranks_[static_cast<size_t>(culprit)].status != 0 && std::ranges::find(ending_.stopped, culprit) == ending_.stopped.end();
  return failed ? culprit : rank;
}

bool LocalJob::runs() const {
  return std::ranges::any_of(ranks_, [](const auto& rank) { return !rank.status; });
}

void LocalJob::wait_for_news() {
  std::vector<pollfd> sources = {{.fd = signals_.incoming.get(), .events = POLLIN, .revents = 0}};
  for (const auto& rank : ranks_) {
    for (const auto& relay : rank.output) {
      if (relay.open()) sources.push_back({.fd = relay.source(), .events = POLLIN, .revents = 0});
    }
  }
  int limit = -1;
  if (!plan_.empty()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(plan_.front().when - Clock::now());
    limit = std::max(0, static_cast<int>(left.count()));
  }
  ::poll(sources.data(), sources.size(), limit);
}

void LocalJob::take_signals() {
  signalfd_siginfo news{};
  while (::read(signals_.incoming.get(), &news, sizeof news) == sizeof news) take_signal(static_cast<int>(news.ssi_signo));
}

void LocalJob::take_signal(int signal) {
  if (signal == SIGTSTP) {
    send(SIGTSTP);
    ::raise(SIGSTOP);
    send(SIGCONT);  // the launcher runs again
  } else if (signal != SIGCHLD) {
    const auto now = Clock::now();
    if (interrupted_) {
      plan_ = {{now, SIGKILL}};
    } else {
      fmt::print(stderr, "launch: passing SIG{} on; ranks that still run in {} s are killed, after another signal at once\n",
                 ::sigabbrev_np(signal), kGrace.count());
      plan_ = {{now, signal}, {now + kGrace, SIGKILL}};
    }
    interrupted_ = signal;
  }
}

bool LocalJob::pump() {
  bool some = false;
  for (auto& rank : ranks_) {
    for (auto& relay : rank.output) some |= relay.pump();
  }
  return some;
}

void LocalJob::reap() {
  for (size_t i = 0; i < ranks_.size(); i++) {
    auto& rank = ranks_[i];
    if (rank.status) continue;
    rank.status = rank.process.wait(std::chrono::milliseconds(0));
    if (!rank.status) continue;
    ::kill(-rank.process.pid(), SIGKILL);  // the processes that it has left behind
    watchdog_.watch(static_cast<int>(i), 0);
    if (*rank.status == 0 || interrupted_) continue;
    // A rank that was killed by a signal counts as the first to fail, even if a rank that only noticed its death ended before it.
    const bool killed = *rank.status > 128 && ending_.status <= 128 && ending_.stopped.empty();
    if (ending_.failed_rank && !killed) continue;
    ending_.failed_rank = static_cast<int>(i);
    ending_.status = *rank.status;
    const auto now = Clock::now();
    plan_ = {{now + kLastWords, SIGTERM}, {now + kLastWords + kEnough, SIGKILL}};
  }
}

void LocalJob::act() {
  while (!plan_.empty() && plan_.front().when <= Clock::now()) {
    const int signal = plan_.front().signal;
    plan_.erase(plan_.begin());
    if (ending_.failed_rank && ending_.stopped.empty()) {
      for (size_t i = 0; i < ranks_.size(); i++) {
        if (!ranks_[i].status) ending_.stopped.push_back(static_cast<int>(i));
      }
    }
    send(signal);
  }
}

void LocalJob::send(int signal) {
  for (const auto& rank : ranks_) {
    if (!rank.status) ::kill(-rank.process.pid(), signal);
  }
}

}  // namespace tessera::cli
