#include "tessera/cli/launch/local_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/cli/launch/core_sets.h"

namespace tessera::cli {
namespace {

constexpr auto kLook = std::chrono::milliseconds(200);  // how often to reread the launch record once a rank has ended
constexpr auto kLastWords = std::chrono::seconds(1);    // the time between a failure and SIGTERM
constexpr auto kEnough = std::chrono::seconds(3);       // the time between SIGTERM and SIGKILL

constexpr auto kSameKey = std::chrono::milliseconds(200);     // within this time, a second typed signal counts as the same signal
constexpr auto kSameEvent = std::chrono::milliseconds(1000);  // within this time, any other second signal counts as the same signal

bool is_typed(int signal) {
  return signal == SIGINT || signal == SIGQUIT;
}

std::string prefix(int rank, const Output& target) {
  const auto text = fmt::format("[rank {}] ", rank);
  const auto clear = target.fresh_line();
  if (clear.empty() || env("NO_COLOR")) return clear + text;
  constexpr std::array kColours = {36, 33, 35, 32, 34, 31};
  return clear + fmt::format("\033[{}m{}\033[0m", kColours[static_cast<size_t>(rank) % kColours.size()], text);
}

std::string how_it_ended(int status) {
  if (status <= 128 || ::sigabbrev_np(status - 128) == nullptr) return fmt::format("ended with status {}", status);
  const int signal = status - 128;
  const auto* const hint = signal == SIGKILL ? "; if nobody killed it by hand, memory ran out" : "";
  return fmt::format("was killed by signal {} (SIG{}{})", signal, ::sigabbrev_np(signal), hint);
}

/// Cuts a text to what a terminal shows at once.
std::string shortened(const std::string& text) {
  constexpr size_t kMost = 4000;
  return text.size() <= kMost ? text : text.substr(0, kMost) + fmt::format(" ... ({} bytes)", text.size());
}

}  // namespace

LocalJob::LocalJob(Job job, Console& console, HeldSignals& signals)
    : job_(std::move(job)), console_(console), signals_(signals), watchdog_(job_.ranks) {
  ranks_.reserve(static_cast<size_t>(job_.ranks));
  for (int place = 0; place < job_.ranks; place++) start(place);
}

void LocalJob::start(int place) {
  const int rank = job_.first_rank + place;
  LogFile out_log, err_log;
  std::string error_path;
  if (job_.logs.empty()) {
    error_path = error_files_.emplace_back("tessera-error-record").path();
  } else {
    const auto folder = make_rank_folder(job_.logs, job_.attempt, rank);
    out_log = LogFile(folder / "stdout.log");
    err_log = LogFile(folder / "stderr.log");
    error_path = folder / "error.json";
  }
  auto environment = job_.environment;
  environment["RANK"] = std::to_string(rank);
  environment["LOCAL_RANK"] = std::to_string(place);
  environment[LaunchRecord::kVariable] = record_.path();
  environment[kErrorFile] = error_path;
  // Rank 0 writes directly to a terminal, because progress bars check whether they write to one.
  const bool direct = rank == 0 && console_.out().is_terminal() && job_.logs.empty();
  const auto processors = job_.cores.empty() ? std::optional<cpu_set_t>() : to_cpu_set(job_.cores[static_cast<size_t>(place)]);
  Pipe out, err;
  const auto prepare = [&] {
    ::setpgid(0, 0);
    // The rank is not in the terminal's foreground group, so SIGTTIN and SIGTTOU would stop it when it uses the terminal.
    ::signal(SIGPIPE, SIG_DFL);
    ::signal(SIGTTIN, SIG_IGN);
    ::signal(SIGTTOU, SIG_IGN);
    ::pthread_sigmask(SIG_SETMASK, &signals_.before, nullptr);
    if (processors) ::sched_setaffinity(0, sizeof *processors, &*processors);
    if (rank != 0) ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    if (!direct) ::dup2(out.write.get(), STDOUT_FILENO);
    ::dup2(err.write.get(), STDERR_FILENO);
  };
  ranks_.push_back({.process = Process(job_.command, environment, Process::Output::Inherit, prepare),
                    .output = {},
                    .status = {},
                    .error_path = error_path});
  auto& started = ranks_.back();
  watchdog_.watch(place, started.process.pid());
  auto& output = console_.out();
  auto& errors = console_.err();
  const bool shows_out = job_.tee == Tee::Out || job_.tee == Tee::Both, shows_err = job_.tee == Tee::Err || job_.tee == Tee::Both;
  if (!direct)
    started.output.emplace_back(std::move(out.read), shows_out ? &output : nullptr, prefix(rank, output), std::move(out_log), rank);
  started.output.emplace_back(std::move(err.read), shows_err ? &errors : nullptr, prefix(rank, errors), std::move(err_log), rank,
                              &recent_errors_);
}

Ending LocalJob::run() {
  while (runs()) {
    wait_for_news();
    take_news_from_others();
    take_signals();
    relay_output();
    reap();
    find_early_leaver();
    act();
  }
  ending_.ranks = job_.ranks;
  for (auto& rank : ranks_) {
    for (auto& relay : rank.output) {
      relay.finish();
      if (const auto trouble = relay.log().trouble()) ending_.trouble.push_back(*trouble);
    }
    // This SIGKILL is not from the launcher: somebody else sent it, or memory ran out. With --min-ranks, a further attempt does without
    // this rank.
    if (*rank.status == 128 + SIGKILL && !rank.stopped && !interrupted_) ending_.ranks--;
  }
  for (const auto& [rank, told] : record_.read()) {
    ending_.joined |= told.joined > 0;
    ending_.read_settings |= told.read_settings;
  }
  if (interrupted_) say("");  // a rank has perhaps left an unfinished line
  ending_.interrupted = interrupted_.has_value();
  if (failed_rank_) {
    ending_.failed = true;
    for (auto& rank : ranks_) rank.error = read_error_record(rank.error_path);
    because_ = left_waiting_.empty() ? find_culprit() : fmt::format(", while {} waited for it to join", name_ranks(left_waiting_));
    const auto& failed = at(*failed_rank_);
    ending_.status = left_waiting_.empty() && !failed.stopped ? *failed.status : 1;
    ending_.report = report();
  } else if (interrupted_ && std::ranges::any_of(ranks_, [](const auto& rank) { return *rank.status != 0; })) {
    ending_.status = 128 + *interrupted_;
  }
  return ending_;
}

void LocalJob::say(std::string_view words) {
  console_.err().write(console_.err().fresh_line() + std::string(words));
}

bool LocalJob::has_ended_well(int rank) const {
  return at(rank).status == 0;
}

std::vector<int> LocalJob::running() const {
  std::vector<int> numbers;
  for (const auto& rank : ranks_) {
    if (!rank.status) numbers.push_back(number_of(rank));
  }
  return numbers;
}

bool LocalJob::runs() const {
  return std::ranges::any_of(ranks_, [](const auto& rank) { return !rank.status; });
}

std::vector<int> LocalJob::stopped() const {
  std::vector<int> numbers;
  for (const auto& rank : ranks_) {
    if (rank.stopped) numbers.push_back(number_of(rank));
  }
  return numbers;
}

/// Looks for the rank that caused the failure, and makes it the failed rank: follows the launch record from the rank that ended first to
/// the rank because of which that rank failed, and so on. Returns the words about the cause of the failed rank's own failure if the cause
/// is a rank that can't be reported, because it is on another node, still ran, or ended with status 0.
std::string LocalJob::find_culprit() {
  auto told = record_.read();
  int rank = *failed_rank_;
  // A rank that recorded its error earlier failed earlier, though it took longer to end.
  for (const auto& each : ranks_) {
    const auto &own = each.error, &first = at(rank).error;
    if (each.status != 0 && own && first && own->when < first->when) rank = number_of(each);
  }
  for (std::set<int> seen; seen.insert(rank).second;) {
    failed_rank_ = rank;
    const int culprit = told[rank].culprit.value_or(rank);
    if (culprit < 0 || culprit >= job_.world_size) return {};
    if (culprit < job_.first_rank || culprit >= job_.first_rank + job_.ranks) {
      ending_.noticed = true;
      return fmt::format("; it failed because of rank {}, on another node", culprit);
    }
    const auto& other = at(culprit);
    // A rank that launch has stopped failed by itself only if it had recorded an error.
    if (other.stopped && !other.error)
      return culprit == rank ? "" : fmt::format("; it failed because of rank {}, which still ran", culprit);
    if (culprit != rank && other.status == 0) return fmt::format("; rank {}, which it still needed, had ended with status 0", culprit);
    rank = culprit;
  }
  return {};
}

std::string LocalJob::report() const {
  const auto& failed = at(*failed_rank_);
  std::vector<std::string> lines(failed.output.back().last_lines().begin(), failed.output.back().last_lines().end());
  const bool silent = lines.empty() && !failed.error;
  auto text = fmt::format("rank {} {}", *failed_rank_, how_it_ended(left_waiting_.empty() ? ending_.status : 0));
  if (silent) text += " and said nothing on standard error";
  text += because_;
  if (const auto others = stopped(); !others.empty()) text += fmt::format(" (stopped {})", name_ranks(others));
  const auto signal = ending_.status - 128;
  if (silent && (signal == SIGSEGV || signal == SIGABRT || signal == SIGFPE))
    text += "; to see where, start gdb -batch -ex run -ex bt --args PROGRAM in place of PROGRAM";
  if (silent) return text + "\n";
  text += failed.error ? "; its error:\n" : "; its last words:\n";
  if (failed.error) lines = {shortened(printable(failed.error->message, "\n"))};
  for (const auto& line : lines) text += fmt::format("  {}\n", line);
  return text;
}

void LocalJob::wait_for_news() {
  std::vector<pollfd> sources = {{.fd = signals_.incoming.get(), .events = POLLIN, .revents = 0},
                                 {.fd = job_.news, .events = POLLIN, .revents = 0}};  // poll() ignores a descriptor of -1
  for (const auto& rank : ranks_) {
    for (const auto& relay : rank.output) {
      if (relay.source() >= 0) sources.push_back({.fd = relay.source(), .events = POLLIN, .revents = 0});
    }
  }
  for (const auto* output : {&console_.out(), &console_.err()}) {
    if (!output->idle()) sources.push_back({.fd = output->descriptor(), .events = POLLOUT, .revents = 0});
  }
  std::optional<Clock::time_point> end;
  if (!plan_.empty()) end = plan_.front().when;
  const bool some_ended = running().size() < ranks_.size();
  if ((some_ended && !failed_rank_) || watchdog_missed_) end = std::min(end.value_or(Clock::time_point::max()), Clock::now() + kLook);
  const auto left = end ? std::chrono::ceil<std::chrono::milliseconds>(*end - Clock::now()) : std::chrono::milliseconds(-1);
  ::poll(sources.data(), sources.size(), end ? std::max(0, static_cast<int>(left.count())) : -1);
}

void LocalJob::take_news_from_others() {
  char signal = 0;
  if (job_.news < 0 || ended_from_elsewhere_ || ::read(job_.news, &signal, 1) != 1) return;
  ended_from_elsewhere_ = true;
  if (signal != 0) {
    if (!interrupted_) pass_on(signal);
  } else if (!failed_rank_) {
    stop_soon();
  }
}

void LocalJob::take_signals() {
  while (const auto signal = signals_.take()) take_signal(*signal);
}

void LocalJob::take_signal(int signal) {
  if (signal == SIGTSTP) return stop_for_a_while();
  if (signal == SIGCHLD) return;
  if (signal == SIGUSR1 || signal == SIGUSR2) return send(signal);  // the program gives these signals their meaning
  const auto now = Clock::now();
  if (!interrupted_) {
    if (is_typed(signal) && console_.err().is_terminal()) console_.err().write("\n");  // the terminal has just written ^C
    job_.tell(signal);
    pass_on(signal);
  } else if (now < interrupted_at_ + (is_typed(signal) ? kSameKey : kSameEvent)) {
    return;  // a terminal that closes, or `timeout`, sends the same signal to the process and to its group
  } else {
    plan_ = {{now, SIGKILL, "at another signal"}};
  }
  interrupted_ = signal;
}

void LocalJob::pass_on(int signal) {
  const auto now = Clock::now();
  say(fmt::format("launch: passing SIG{} on; ranks that still run in {} s are killed; another signal kills them at once\n",
                  ::sigabbrev_np(signal), job_.grace.count()));
  plan_ = {{now, signal}, {now + job_.grace, SIGKILL, fmt::format("{} s after SIG{}", job_.grace.count(), ::sigabbrev_np(signal))}};
  interrupted_ = signal;
  interrupted_at_ = now;
}

/// Stops the ranks and then this process, as Ctrl-Z asks for.
void LocalJob::stop_for_a_while() {
  send(SIGTSTP);
  HeldSignals::stop_for_a_while();
  send(SIGCONT);  // the launcher runs again
}

void LocalJob::relay_output() {
  for (auto* output : {&console_.out(), &console_.err()}) output->flush();
  // Begins with another rank each time, so that a rank that prints without end does not keep the others from printing.
  first_relay_ = (first_relay_ + 1) % ranks_.size();
  for (size_t i = 0; i < ranks_.size(); i++) {
    for (auto& relay : ranks_[(first_relay_ + i) % ranks_.size()].output) relay.pump();
  }
}

void LocalJob::reap() {
  for (auto& rank : ranks_) {
    if (rank.status) continue;
    rank.status = rank.process.wait(std::chrono::milliseconds(0));
    if (!rank.status) continue;
    ::kill(-rank.process.pid(), SIGKILL);  // the processes that the rank has left behind
    watchdog_.watch(static_cast<int>(&rank - ranks_.data()), 0);
    if (*rank.status == 0 || interrupted_ || rank.stopped) continue;
    // A rank that was killed by a signal counts as the first to fail, even if a rank that only noticed its death ended before it.
    const bool killed = *rank.status > 128 && ending_.status <= 128 && stopped().empty() && left_waiting_.empty();
    if (failed_rank_ && !killed) continue;
    fail(number_of(rank));
  }
  keep_watchdog();
}

void LocalJob::keep_watchdog() {
  try {
    if (runs() && watchdog_.revive()) say("launch: the process that guards against leftovers has ended; started it again\n");
    watchdog_missed_ = false;
  } catch (const IoError& error) {
    if (!std::exchange(watchdog_missed_, true)) say(fmt::format("launch: {}; trying again from time to time\n", error.what()));
  }
}

/// Makes a rank the failed rank if it has ended with status 0 while others wait for it to join, because they would wait until their time
/// limit.
void LocalJob::find_early_leaver() {
  if (failed_rank_ || interrupted_) return;
  const auto running_ranks = running();
  if (running_ranks.empty() || running_ranks.size() == ranks_.size()) return;
  auto told = record_.read();
  for (const auto& each : ranks_) {
    const int rank = number_of(each);
    if (!has_ended_well(rank)) continue;
    std::vector<int> waiting;
    std::ranges::copy_if(running_ranks, std::back_inserter(waiting),
                         [&](int other) { return told[other].waits() && told[other].starts > told[rank].joined; });
    if (waiting.empty()) continue;
    left_waiting_ = std::move(waiting);
    fail(rank);
    return;
  }
}

void LocalJob::fail(int rank) {
  failed_rank_ = rank;
  ending_.status = *at(rank).status;
  job_.tell(0);
  stop_soon();
}

/// Plans to stop the ranks after a failure. Before that, they have time to print what they know about it.
void LocalJob::stop_soon() {
  const auto now = Clock::now();
  plan_ = {{now + kLastWords, SIGTERM}, {now + kLastWords + kEnough, SIGKILL, fmt::format("{} s after SIGTERM", kEnough.count())}};
}

/// Names the ranks that are about to be killed, because a rank that hangs without handling signals can't say so itself.
void LocalJob::name_those_that_still_run(const std::string& after) {
  const auto hanging = running();
  if (hanging.empty()) return;
  say(fmt::format("launch: {} still {} {}, and {} killed\n", name_ranks(hanging), hanging.size() == 1 ? "runs" : "run", after,
                  hanging.size() == 1 ? "is" : "are"));
}

void LocalJob::act() {
  while (!plan_.empty() && plan_.front().when <= Clock::now()) {
    const auto [when, signal, after] = plan_.front();
    plan_.erase(plan_.begin());
    if (signal == SIGKILL) name_those_that_still_run(after);
    if (!interrupted_ && stopped().empty()) {
      for (const int rank : running()) at(rank).stopped = true;
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
