// `tessera test`: runs the conformance checks over each transport and prints a result for every operation, or measures speed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "tessera/base/atomic_write.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/launcher.h"
#include "tessera/base/log.h"
#include "tessera/base/port.h"
#include "tessera/base/process.h"
#include "tessera/base/secret.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"
#include "tessera/cli/launch/ranks_here.h"
#include "tessera/cli/output.h"
#include "tessera/cli/speed.h"
#include "tessera/comm/conformance.h"
#include "tessera/comm/engines.h"
#include "tessera/comm/init.h"

namespace tessera::cli {
namespace {

// Set for the ranks that this command starts, so that they don't print the heading again.
constexpr const char* kStartedByTest = "TESSERA_STARTED_BY_TEST";

struct TestFlags {
  std::string transport = "all";
  int ranks = 2;
  double limit_s = 60;
  bool speed = false;     // measures instead of checking
  std::string calibrate;  // the file for what is measured; empty unless --calibrate is given
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();

  bool measures() const { return speed || !calibrate.empty(); }
  /// The time left until the limit, at least a millisecond.
  std::chrono::milliseconds left() const {
    const auto end = start + std::chrono::milliseconds(static_cast<int64_t>(limit_s * 1000));
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    return std::max(left, std::chrono::milliseconds(1));
  }
};

struct Checked {
  std::string operation;
  int checks = 0;
  int failures = 0;  // on all ranks
  std::chrono::duration<double> time{};
};

void print(const Checked& verdict) {
  fmt::print("  {:<16}{:<8}{:>4} checks{:>9.1f} ms\n", verdict.operation, verdict.failures == 0 ? "ok" : "FAILED", verdict.checks,
             verdict.time.count() * 1e3);
  std::fflush(stdout);
}

/// Holds back the errors that checks provoke in the log. The destructor prints them unless end(true) was called.
class HeldErrors {
 public:
  HeldErrors() {
    set_log_sink([this](const LogRecord& record) {
      if (record.level < LogLevel::Error) return print_record(record);
      const std::lock_guard lock(held_->mutex);
      held_->errors.emplace_back(record.rank, record.text);
    });
  }
  HeldErrors(const HeldErrors&) = delete;
  HeldErrors& operator=(const HeldErrors&) = delete;
  ~HeldErrors() {
    set_log_sink({});
    const std::lock_guard lock(held_->mutex);
    for (const auto& [rank, text] : held_->errors) print_record({.level = LogLevel::Error, .rank = rank, .text = text});
  }

  /// Drops the errors if all went well. Returns the exit status of a test.
  int end(bool is_good) {
    const std::lock_guard lock(held_->mutex);
    if (is_good) held_->errors.clear();
    return is_good ? 0 : 1;
  }

  /// Returns a function that returns the errors held when it is called, a line each. Any thread may call it, also after this object is gone.
  std::function<std::string()> lines() const {
    return [held = held_] {
      const std::lock_guard lock(held->mutex);
      std::string lines;
      for (const auto& [rank, text] : held->errors) lines += fmt::format("tessera: error: {}\n", text);
      return lines;
    };
  }

 private:
  struct Held {
    std::mutex mutex;
    std::vector<std::pair<int, std::string>> errors;  // with the rank that logged the error
  };
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();
};

/// Runs one operation's checks. Collective. Each rank prints the checks that failed on it.
Checked run_checks(const Communicator& world, const std::string& operation, std::span<const ConformanceCheck> checks) {
  Checked verdict{.operation = operation, .checks = static_cast<int>(checks.size())};
  const auto start = std::chrono::steady_clock::now();
  for (const auto& check : checks) {
    try {
      check.run(world);
    } catch (const CommError&) {
      throw;  // the group can't be used any more
    } catch (const std::exception& error) {
      verdict.failures++;
      fmt::print("  rank {}: {} {}: {}\n", world.local_ranks().front(), check.operation, check.what, error.what());
    }
  }
  verdict.time = std::chrono::steady_clock::now() - start;
  if (world.traits().traces) return verdict;  // this process is all ranks
  const auto failures = at::full({1}, int64_t{verdict.failures});
  world.all_reduce(failures).wait();
  verdict.failures = failures.item<int>();
  return verdict;
}

/// Runs all checks, operation by operation, or measures speed; rank 0 prints. Collective. Returns whether all checks passed on all ranks.
bool report(const Communicator& world, const TestFlags& flags) {
  if (flags.measures()) {
    flags.speed ? measure_speed(world) : calibrate(world, flags.calibrate);
    std::fflush(stdout);
    return true;
  }
  const auto checks = conformance_checks(world);
  std::vector<std::string> operations;
  for (const auto& check : checks) {
    if (std::ranges::find(operations, check.operation) == operations.end()) operations.push_back(check.operation);
  }
  bool good = true;
  for (const auto& operation : operations) {
    std::vector<ConformanceCheck> some;
    std::ranges::copy_if(checks, std::back_inserter(some), [&](const auto& check) { return check.operation == operation; });
    try {
      const auto verdict = run_checks(world, operation, some);
      good &= verdict.failures == 0;
      if (world.is_first() || world.traits().simulated) print(verdict);
    } catch (const CommError& error) {
      fmt::print("  {:<16}FAILED  on rank {}: {}\n", operation, world.local_ranks().front(), error.what());
      std::fflush(stdout);
      return false;
    }
  }
  return good;
}

/// Starts this program once for each rank. When one fails, the others get a moment to print what they know about it.
bool test_processes(const std::string& transport, const TestFlags& flags) {
  const auto port = std::to_string(free_port());
  const auto limit = flags.left();
  const auto limit_of_ranks = limit * 4 / 5;  // shorter, so that ranks can say for which rank they have waited
  const auto secret = random_secret();
  std::vector<Process> ranks;
  std::vector<std::string> command = {this_program(), "test", "--limit", fmt::format("{}", static_cast<double>(limit_of_ranks.count()) / 1e3)};
  if (flags.speed) command.emplace_back("--speed");
  if (!flags.calibrate.empty()) command.insert(command.end(), {"--calibrate", flags.calibrate});
  for (int rank = 0; rank < flags.ranks; rank++) {
    ranks.emplace_back(
        command,
        std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                           {"WORLD_SIZE", std::to_string(flags.ranks)},
                                           {"MASTER_ADDR", "127.0.0.1"},
                                           {"MASTER_PORT", port},
                                           {"TESSERA_STORE", ""},
                                           {"TESSERA_SECRET", secret},
                                           {"OMP_NUM_THREADS", threads_of_a_rank(flags.ranks)},
                                           {"TESSERA_TRANSPORT", transport},
                                           {kStartedByTest, "1"}});
  }
  constexpr auto kLook = std::chrono::milliseconds(20);
  constexpr auto kLastWords = std::chrono::seconds(3);
  auto end = std::chrono::steady_clock::now() + limit;
  std::vector<std::optional<int>> status(ranks.size());
  const auto still_runs = [](const auto& one) { return !one.has_value(); };
  bool good = true;
  while (std::ranges::any_of(status, still_runs) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kLook);
    for (size_t rank = 0; rank < ranks.size(); rank++) {
      if (status[rank]) continue;
      status[rank] = ranks[rank].wait(std::chrono::milliseconds(0));
      if (!status[rank] || *status[rank] == 0) continue;
      fmt::print("  rank {} ended with status {}\n", rank, *status[rank]);
      if (good) end = std::min(end, std::chrono::steady_clock::now() + kLastWords);
      good = false;
    }
  }
  for (size_t rank = 0; rank < ranks.size(); rank++) {
    if (!status[rank]) fmt::print("  rank {} did not end and is stopped\n", rank);
  }
  return good && std::ranges::none_of(status, still_runs);
}

bool test_engine(const Engine& engine, const TestFlags& flags) {
  const int ranks = engine.reach == Engine::Reach::OneRank ? 1 : flags.ranks;
  fmt::print("{}: {} rank{}, {}\n", engine.name, ranks, ranks == 1 ? "" : "s", engine.ranks);
  std::fflush(stdout);
  if (const auto why_not = engine.why_not(); !why_not.empty()) {
    fmt::print("  left out: {}\n", why_not);
    return flags.transport == "all";
  }
  try {
    if (engine.run == nullptr) return test_processes(std::string(engine.name), flags);
    if (!env("OMP_NUM_THREADS")) at::set_num_threads(std::max(1, cores() / ranks));
    std::atomic<bool> good = true;
    engine.run(
        ranks,
        [&](const Communicator& world) {
          if (!report(world, flags)) good = false;
        },
        flags.left());
    return good;
  } catch (const std::exception& error) {
    fmt::print("  FAILED  {}\n", error.what());
    return false;
  }
}

/// Runs as one rank of a group that torchrun, mpirun or test_processes has started.
bool test_as_rank(const TestFlags& flags) {
  const auto world = init({.start_limit = flags.left(), .operation_limit = flags.left()});
  if (world.rank() == 0 && !env(kStartedByTest))
    fmt::print("{}: {} rank{}{}\n", world.traits().name, world.size(), world.size() == 1 ? "" : "s",
               world.traits().levels == 2 ? " at two levels" : "");
  return report(world, flags);
}

/// Ends this process when the limit is over, even if other threads still wait, and prints the errors that are held.
void keep_limit(const TestFlags& flags, std::function<std::string()> held) {
  std::thread([left = flags.left(), seconds = flags.limit_s, held = std::move(held)] {
    constexpr auto kMoment = std::chrono::seconds(1);  // for ranks that notice the end of the limit themselves
    std::this_thread::sleep_for(left + kMoment);
    const auto words = held() + fmt::format("tessera: the test has not ended within {} s; --limit gives it more\n", seconds);
    Output(STDERR_FILENO).write(words);  // never blocks, unlike stderr, whose reader may be the reason why the test hangs
    std::_Exit(1);
  }).detach();
}

/// Throws ConfigError if a launcher started this rank and the command line has --ranks or --transport as well, or if no launcher started it
/// and TESSERA_TRANSPORT is set. `has_choice`: whether the command line has --ranks or --transport.
void expect_one_master(bool has_choice) {
  if (identity_from_environment()) {
    if (!has_choice) return;
    throw ConfigError(
        "the launcher that started this rank decides how many there are, and TESSERA_TRANSPORT what they talk over: leave --ranks "
        "and --transport out, or start the command without a launcher");
  }
  if (const auto given = env("TESSERA_TRANSPORT")) {
    throw ConfigError("TESSERA_TRANSPORT='{}' is set, but this command takes --transport instead; unset the variable", *given);
  }
}

int run(const TestFlags& flags) {
  HeldErrors errors;
  keep_limit(flags, errors.lines());
  const auto identity = identity_from_environment();
  if (!flags.calibrate.empty() && (!identity || identity->rank == 0)) {  // before half a minute of measurements is lost
    if (is_folder(flags.calibrate)) throw ConfigError("--calibrate {} is a folder; name a file in it", flags.calibrate);
    const NewFile can_be_made(flags.calibrate);
  }
  if (identity) return errors.end(test_as_rank(flags));
  bool good = true;
  // One transport measures a machine: that of ranks of a host.
  const auto transport = flags.calibrate.empty() || flags.transport != "all" ? flags.transport : "shm";
  for (const auto& engine : engines()) {
    if (transport == "all" || transport == engine.name) good &= test_engine(engine, flags);
  }
  if (good && flags.measures()) return errors.end(good);
  fmt::print("{}\n", good ? "all transports keep their promises" : "some checks failed or could not run: see the lines above");
  return errors.end(good);
}

}  // namespace

void add_test_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command =
      app.add_subcommand("test", "Checks that ranks on this machine can communicate, and prints a result for every operation");
  const auto flags = std::make_shared<TestFlags>();
  std::vector<std::string> names = {"all"};
  for (const auto& engine : engines()) names.emplace_back(engine.name);
  auto* transport =
      command->add_option("--transport", flags->transport, "What the ranks talk over")->check(one_of(names))->capture_default_str();
  auto* ranks =
      command->add_option("--ranks", flags->ranks, "How many ranks; the transport self always has one")->check(from_to(1, 64))->capture_default_str();
  command->add_option("--limit", flags->limit_s, "Seconds that the whole test may take")
      ->check(from_to(0.1, 3600.0))
      ->capture_default_str();
  auto* speed = command->add_flag("--speed", flags->speed,
                    "Measure bandwidth and latency between ranks, and how fast each computes, and name slow ranks, instead of checking");
  command
      ->add_option("--calibrate", flags->calibrate,
                   "Measure how fast ranks compute, move memory and reach each other while all of them work, and write it to a file for "
                   "tessera plan, instead of checking; over shm unless --transport is given")
      ->type_name("FILE")
      ->excludes(speed);
  command->footer(Help::footer_of({"tessera test", "tessera test --transport gloo --ranks 4", "mpirun -n 4 tessera test --speed",
                                   "tessera launch -n 4 tessera test --calibrate machine.json",
                                   "torchrun --no-python --nproc-per-node 4 tessera test"},
                                  "If torchrun or mpirun starts it, it runs as one rank of their job."));
  command->callback([&chosen, flags, transport, ranks] {
    expect_one_master(transport->count() + ranks->count() > 0);
    chosen = [flags] { return run(*flags); };
  });
}

}  // namespace tessera::cli
