// `tessera launch`: starts a program as several ranks on this host and waits until all of them have ended.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <string.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/base/port.h"
#include "tessera/base/words.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/config_flags.h"
#include "tessera/cli/help.h"
#include "tessera/cli/local_job.h"
#include "tessera/cli/ranks_here.h"

namespace tessera::cli {
namespace {

std::string plural(int count, const std::string& noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// Refuses to run as one of several ranks of another launcher: each of them would start a job of its own.
void refuse_to_be_a_rank() {
  if (const auto size = env("WORLD_SIZE"); size && *size != "1") {
    throw ConfigError(fmt::format(
        "launch starts all ranks itself, but WORLD_SIZE={} says that it is one of several already; let the other launcher start the "
        "program, or unset WORLD_SIZE",
        *size));
  }
  const auto identity = identity_from_environment();
  if (!identity || identity->world_size == 1) return;
  throw ConfigError(
      fmt::format("launch starts all ranks itself, but another launcher has started it as rank {} of {}; let that one start the "
                  "program",
                  identity->rank, identity->world_size));
}

void check(const std::vector<std::string>& command, int ranks) {
  if (command.empty()) throw ConfigError("launch needs a program to start: tessera launch --nproc-per-node N PROGRAM ARGS...");
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

std::string report(const Ending& ending) {
  const bool silent = ending.last_words.empty();
  auto text = fmt::format("launch: rank {} {}", *ending.failed_rank, how_it_ended(ending.left_waiting.empty() ? ending.status : 0));
  if (silent) text += " and said nothing on standard error";
  if (!ending.left_waiting.empty()) text += fmt::format(", while {} waited for it to join", name_ranks(ending.left_waiting));
  if (ending.left_early) text += fmt::format("; rank {}, which it still needed, had ended with status 0", *ending.left_early);
  if (!ending.stopped.empty()) text += fmt::format("; stopped {}", name_ranks(ending.stopped));
  text += silent ? "\n" : "; its last words:\n";
  for (const auto& line : ending.last_words) text += fmt::format("  {}\n", line);
  return text;
}

/// The variables by which other launchers describe ranks: those of a launcher around this one do not hold for the ranks that this one
/// starts.
std::map<std::string, std::string> environment_of_ranks(const config::Settings& settings, int ranks, int port, const std::string& threads) {
  auto environment = settings.environment();
  for (const auto name : launcher_variables()) environment[std::string(name)] = "";
  environment.merge(std::map<std::string, std::string>{{"TESSERA_STORE", ""}, {"TORCHELASTIC_USE_AGENT_STORE", ""}});
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(ranks);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(port);
  environment["OMP_NUM_THREADS"] = threads;
  environment["TESSERA_SECRET"] = random_secret();
  return environment;
}

int launch(const std::vector<std::string>& command, const config::Settings& settings, int ranks, std::chrono::seconds grace) {
  Console console;
  for (const auto& remark : settings.remarks()) console.err().write(fmt::format("launch: {}\n", remark));
  if (const auto warning = warning_of_unknown_env()) console.err().write(fmt::format("launch: {}\n", *warning));
  const auto threads = threads_of_a_rank(ranks);
  const auto port = free_port();
  console.err().write(fmt::format("launch: {} on {}, {} thread{} each ({}), port {}\n", plural(ranks, "rank"), plural(cores(), "core"),
                                  threads, threads == "1" ? "" : "s",
                                  env("OMP_NUM_THREADS") ? "OMP_NUM_THREADS as it was" : "OMP_NUM_THREADS", port));
  const auto ending = LocalJob(command, ranks, environment_of_ranks(settings, ranks, port, threads), grace, console).run();
  if (ending.failed_rank) console.err().write(console.err().fresh_line() + report(ending));
  console.finish();
  if (const auto trouble = console.out().trouble()) {
    console.err().write(fmt::format("launch: standard output {}\n", *trouble));
    console.finish();
    return ending.status != 0 ? ending.status : 1;
  }
  return ending.status;
}

/// The error of a command line that does not say how many ranks: perhaps it says so behind the program.
ConfigError missing_ranks(const std::vector<std::string>& program) {
  const auto is_it = [](const std::string& word) { return word == "-n" || word.starts_with("--nproc"); };
  const bool is_behind = std::ranges::any_of(program, is_it);
  return ConfigError(is_behind ? "--nproc-per-node stands behind the program, which gets it; flags of launch come before: "
                                 "tessera launch --nproc-per-node N PROGRAM ARGS..."
                               : "--nproc-per-node is required; see tessera launch --help");
}

/// The ranks that the configuration asks for; none if it does not.
std::optional<int> ranks_of(const config::Settings& settings) {
  if (settings.integer("num_machines") > 1) {
    throw ConfigError(
        fmt::format("num_machines {} ({}): launch starts the ranks of one host; torchrun --no-python and mpirun reach several",
                    settings.text("num_machines"), settings.setting("num_machines").where));
  }
  if (!settings.is_set("num_processes")) return {};
  return static_cast<int>(std::min<int64_t>(settings.integer("num_processes"), std::numeric_limits<int>::max()));
}

/// CLI11's usage line would not show the program and its arguments, because they are no options.
struct LaunchHelp : Help {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: tessera launch --nproc-per-node N PROGRAM ARGS...\n";
  }
};

}  // namespace

void add_launch_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("launch", "Starts a program as several ranks on this host")->group("Commands");
  command->formatter(std::make_shared<LaunchHelp>());
  const auto ranks = std::make_shared<int>(1);
  const auto* flag = command->add_option("-n,--nproc-per-node", *ranks, "How many ranks; num_processes unless given")->type_name("N");
  const auto grace = std::make_shared<int>(10);
  command->add_option("--grace", *grace, "How many seconds ranks may still run after a signal that asks them to end")
      ->type_name("S")
      ->capture_default_str()
      ->check(CLI::Range(0, 86'400));
  const ConfigFlags configuration(*command);
  command->prefix_command();
  command->footer(
      "Each line that a rank prints gets its number in front. When a rank fails, the others are stopped and its last words are repeated. "
      "Ctrl-C reaches the ranks; a second one kills them. Nothing is left behind, whatever becomes of launch. A rank has the cores / N "
      "threads in OMP_NUM_THREADS, unless that is set. Standard input goes to rank 0.\n\n"
      "Examples:\n"
      "  tessera launch --nproc-per-node 2 tessera test\n"
      "  tessera launch --nproc-per-node 4 ./train --epochs 3\n"
      "  tessera launch --config-file run.yaml --mixed-precision bf16 ./train\n"
      "\ntorchrun --no-python and mpirun start the same programs.\n\n"
      "Exit status: 0 if that of all ranks is 0, or else that of the rank that failed first; 1 if launch itself failed, 2 if the command "
      "line is wrong, 128 + n after signal n.");
  command->callback([&chosen, command, flag, ranks, grace, configuration] {
    const auto settings = configuration.settings();
    if (const auto wanted = ranks_of(settings); flag->count() == 0) {
      if (!wanted) throw missing_ranks(command->remaining());
      *ranks = *wanted;
    }
    check(command->remaining(), *ranks);
    chosen = [command, settings, ranks, grace] { return launch(command->remaining(), settings, *ranks, std::chrono::seconds(*grace)); };
  });
}

}  // namespace tessera::cli
