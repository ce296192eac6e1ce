// `tessera launch`: starts a program as several ranks on this host and waits until all of them have ended.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <string.h>

#include <CLI/CLI.hpp>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/port.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/local_job.h"

namespace tessera::cli {
namespace {

/// The cores that this process may use.
int cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string plural(int count, const std::string& noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// Refuses to run as a rank of another launcher: that one's variables would contradict the ranks that this one starts.
void refuse_to_be_a_rank() {
  for (const char* name : {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"}) {
    const auto size = env(name);
    if (!size || *size == "1") continue;
    throw ConfigError(
        fmt::format("launch starts all ranks itself, but {}={} says that it is one of several already; let the other launcher start the "
                    "program, or unset {}",
                    name, *size, name));
  }
}

void check(const std::vector<std::string>& command, int ranks) {
  if (command.empty()) throw ConfigError("launch needs a program to start: tessera launch --nproc-per-node N PROGRAM ARGS...");
  if (command.front().starts_with('-')) {
    throw ConfigError(
        fmt::format("launch has no option {}; its options come before the program, those of the program after it", command.front()));
  }
  const int most = std::max(64, 4 * cores());
  if (ranks < 1 || ranks > most) {
    throw ConfigError(
        fmt::format("--nproc-per-node {} makes no sense on this host: it has {}, so 1 to {} ranks", ranks, plural(cores(), "core"), most));
  }
  refuse_to_be_a_rank();
}

std::string how_it_ended(int status) {
  if (status <= 128 || ::sigabbrev_np(status - 128) == nullptr) return fmt::format("ended with status {}", status);
  const int signal = status - 128;
  const auto* const hint = signal == SIGKILL ? "; if nobody did that by hand, memory ran out" : "";
  return fmt::format("was killed by signal {} (SIG{}{})", signal, ::sigabbrev_np(signal), hint);
}

void report(const Ending& ending) {
  if (!ending.failed_rank) return;
  const auto others = ending.stopped.empty()
                          ? ""
                          : fmt::format("; stopped {} {}", ending.stopped.size() == 1 ? "rank" : "ranks", fmt::join(ending.stopped, ", "));
  const bool silent = ending.last_words.empty();
  fmt::print(stderr, "launch: rank {} {}{}{}{}\n", *ending.failed_rank, how_it_ended(ending.status),
             silent ? " and said nothing on standard error" : "", others, silent ? "" : "; its last words:");
  for (const auto& line : ending.last_words) fmt::print(stderr, "  {}\n", line);
}

int launch(const std::vector<std::string>& command, int ranks) {
  check(command, ranks);
  if (const auto warning = warning_of_unknown_env()) fmt::print(stderr, "launch: {}\n", *warning);
  const auto given = env("OMP_NUM_THREADS");
  const auto threads = given.value_or(std::to_string(std::max(1, cores() / ranks)));
  const auto port = free_port();
  fmt::print(stderr, "launch: {} on {}, {} thread{} each ({}), port {}\n", plural(ranks, "rank"), plural(cores(), "core"), threads,
             threads == "1" ? "" : "s", given ? "OMP_NUM_THREADS as it was" : "OMP_NUM_THREADS", port);
  LocalJob job(command, ranks,
               {{"WORLD_SIZE", std::to_string(ranks)},
                {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                {"MASTER_ADDR", "127.0.0.1"},
                {"MASTER_PORT", std::to_string(port)},
                {"OMP_NUM_THREADS", threads},
                // If these were inherited, the ranks would look for another store.
                {"TESSERA_STORE", ""},
                {"TORCHELASTIC_USE_AGENT_STORE", ""}});
  const auto ending = job.run();
  report(ending);
  return ending.status;
}

/// CLI11's usage line would not show the program and its arguments, because they are no options.
struct LaunchHelp : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tessera launch --nproc-per-node N PROGRAM ARGS...\n";
  }
};

}  // namespace

void add_launch_command(CLI::App& app) {
  auto* command = app.add_subcommand("launch", "Starts a program as several ranks on this host");
  command->formatter(std::make_shared<LaunchHelp>());
  const auto ranks = std::make_shared<int>(1);
  command->add_option("-n,--nproc-per-node", *ranks, "How many ranks")->required();
  command->prefix_command();
  command->footer(
      "Each line that a rank prints gets its number in front. When a rank fails, the others are stopped, its last\n"
      "words are repeated and its exit status becomes that of launch. Ctrl-C reaches the ranks; a second one kills\n"
      "them. Nothing is left behind, whatever becomes of launch. A rank has the cores / N threads in\n"
      "OMP_NUM_THREADS, unless that is set. Standard input goes to rank 0.\n"
      "  tessera launch --nproc-per-node 2 tessera test\n"
      "  tessera launch --nproc-per-node 4 ./train --epochs 3\n"
      "torchrun --no-python and mpirun start the same programs.");
  command->callback([command, ranks] {
    if (const int status = launch(command->remaining(), *ranks); status != 0) throw CLI::RuntimeError(status);
  });
}

}  // namespace tessera::cli
