// `tessera launch`: makes a plan of its flags and the configuration.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <map>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/base/words.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/config/explain.h"
#include "tessera/cli/config/key_flags.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"
#include "tessera/cli/launch/attempts.h"
#include "tessera/cli/launch/other_launchers.h"
#include "tessera/cli/launch/ranks_here.h"

namespace tessera::cli {
namespace {

const std::map<std::string, Tee> kTees = {{"none", Tee::None}, {"out", Tee::Out}, {"err", Tee::Err}, {"both", Tee::Both}};

/// Refuses to run as one of several ranks of another launcher: each of them would start a job of its own.
void refuse_to_be_a_rank() {
  if (const auto size = env("WORLD_SIZE"); size && *size != "1") {
    throw ConfigError(
        "launch starts all ranks itself, but WORLD_SIZE={} says that it is one of several already; let the other launcher start the "
        "program, or unset WORLD_SIZE",
        *size);
  }
  const auto identity = identity_from_environment();
  if (!identity || identity->world_size == 1) return;
  throw ConfigError(
      "launch starts all ranks itself, but another launcher has started it as rank {} of {}; let that one start the "
      "program",
      identity->rank, identity->world_size);
}

struct LaunchFlags {
  int ranks = 1, threads = 0, grace = 10, node_timeout = 15, max_restarts = 0, min_ranks = 0;
  bool standalone = false, quiet = false;
  std::string endpoint, logs, tee = "both";
  const std::shared_ptr<std::vector<std::string>> remarks = std::make_shared<std::vector<std::string>>();

  /// Takes a number, or one of torchrun's words.
  void read_ranks(const std::string& text) {
    if (text == "auto" || text == "cpu") {
      ranks = cores();
      return;
    }
    const auto* const end = text.data() + text.size();
    if (const auto read = std::from_chars(text.data(), end, ranks); read.ec == std::errc() && read.ptr == end) return;
    const bool is_device = text == "gpu" || text == "xpu" || text == "npu" || text == "mtia";
    throw ConfigError("--nproc-per-node '{}' is {}; write a number, or cpu for a rank on each of the {} here", printable(text),
                      is_device ? "not counted here" : "no number of ranks", counted(cores(), "core"));
  }
};

/// The error of a command line that does not say how many ranks: perhaps it says so behind the program.
ConfigError missing_ranks(const std::vector<std::string>& program) {
  const auto is_it = [](const std::string& word) { return word == "-n" || word.starts_with("--nproc"); };
  const bool is_behind = std::ranges::any_of(program, is_it);
  return ConfigError(is_behind ? "--nproc-per-node stands behind the program, which gets it; flags of launch come before: "
                                 "tessera launch --nproc-per-node N PROGRAM ARGS..."
                               : "--nproc-per-node is required, or num_processes in the configuration; see tessera launch --help");
}

/// The ranks of this host: those of the flag, or the host's part of all that the configuration asks for.
int ranks_of(const CLI::App& command, const LaunchFlags& flags, const config::Settings& settings) {
  const bool given = command.count("--nproc-per-node") > 0;
  if (!given && !settings.is_set("num_processes")) throw missing_ranks(command.remaining());
  const int64_t ranks = given ? flags.ranks : settings.integer("num_processes") / settings.integer("num_machines");
  const int most = std::max(64, 4 * cores());
  if (ranks < 1 || ranks > most) {
    throw ConfigError("{} {} makes no sense on this host: it has {}, so 1 to {} ranks",
                      given ? "--nproc-per-node" : "num_processes / num_machines =", ranks, counted(cores(), "core"), most);
  }
  return static_cast<int>(ranks);
}

/// Takes HOST:PORT apart, also [::1]:29500, and HOST alone.
void read_endpoint(const std::string& endpoint, config::Settings& settings) {
  const bool brackets = endpoint.starts_with('[');
  const auto colon = endpoint.ends_with(']') ? std::string::npos : endpoint.rfind(':');
  auto host = endpoint.substr(0, colon);
  if (host.empty() || (brackets ? !host.ends_with(']') : host.find(':') != std::string::npos)) {
    throw ConfigError("--rdzv-endpoint {} is no HOST:PORT, such as node0:29500 or [fe80::1]:29500", endpoint);
  }
  if (brackets) host = host.substr(1, host.size() - 2);
  settings.set("main_process_ip", host, config::Origin::Flag, "--rdzv-endpoint");
  if (colon != std::string::npos) settings.set("main_process_port", endpoint.substr(colon + 1), config::Origin::Flag, "--rdzv-endpoint");
  settings.expect_consistent();
}

/// Which of the nodes this is: as the flag or the configuration says, or as the launcher around this one has counted, such as srun with a
/// task on each.
int node_of(const config::Settings& settings, int nodes) {
  if (settings.is_set("machine_rank")) return static_cast<int>(settings.integer("machine_rank"));
  const auto identity = identity_from_environment();
  if (identity && identity->world_size == nodes) return identity->rank;
  throw ConfigError("--nnodes {} needs --node-rank, 0 to {}, another one on each node", nodes, nodes - 1);
}

/// One process has all XLA devices of a host, and is as many ranks.
void give_devices_to_one_process(LaunchPlan& plan) {
  plan.environment["TESSERA_TRANSPORT"] = "xla";
  plan.environment["TESSERA_XLA_DEVICES"] = std::to_string(plan.ranks);
  plan.ranks = 1;
}

/// The keys that were given and have no effect unless a program reads them.
std::vector<std::string> keys_for_ranks(const config::Settings& settings) {
  std::vector<std::string> names;
  for (const auto& key : config::keys()) {
    const auto& [value, origin, where] = settings.setting(key.name);
    const bool is_given = origin == config::Origin::Flag || origin == config::Origin::File;
    const bool any_rank_reads_it = key.name == "tessera_transport";
    if (is_given && value != key.otherwise && !key.variable.empty() && has_effect(key) && !any_rank_reads_it) names.emplace_back(key.name);
  }
  return names;
}

LaunchPlan plan_of(const CLI::App& command, const LaunchFlags& flags, config::Settings settings) {
  constexpr int kUsualPort = 29500;
  if (!flags.endpoint.empty()) read_endpoint(flags.endpoint, settings);
  if (flags.standalone && settings.integer("num_machines") > 1) {
    throw ConfigError("--standalone is for one node, but num_machines is {} ({}); leave one of them out", settings.text("num_machines"),
                      settings.setting("num_machines").where);
  }
  LaunchPlan plan = {.command = command.remaining(),
                     .environment = settings.environment(),
                     .asked_for = keys_for_ranks(settings),
                     .ranks = ranks_of(command, flags, settings),
                     .threads = flags.threads,
                     .nodes = static_cast<int>(settings.integer("num_machines")),
                     .point = {.host = settings.text("main_process_ip"), .port = static_cast<int>(settings.integer("main_process_port"))},
                     .bind = settings.is_true("enable_cpu_affinity"),
                     .max_restarts = flags.max_restarts,
                     .min_ranks = flags.min_ranks,
                     .grace = std::chrono::seconds(flags.grace),
                     .node_timeout = std::chrono::seconds(flags.node_timeout),
                     .logs = flags.logs,
                     .tee = kTees.at(flags.tee),
                     .quiet = flags.quiet};
  if (plan.command.empty()) throw ConfigError("launch needs a program to start: tessera launch --nproc-per-node N PROGRAM ARGS...");
  if (const auto gpus = settings.text("gpu_ids"); gpus != "all") plan.gpus = gpus;
  const bool on_xla = settings.text("distributed_type") == "XLA" || env("TESSERA_TRANSPORT") == "xla" || env("TESSERA_DEVICE") == "xla";
  if (on_xla && plan.nodes > 1) throw ConfigError("XLA devices of several nodes are no world yet: leave --nnodes out, or train on the CPU or on GPUs");
  if (plan.nodes == 1) {
    refuse_to_be_a_rank();
    if (plan.min_ranks > plan.ranks)
      throw ConfigError("--min-ranks {} can't be kept: there are {} from the beginning", plan.min_ranks, counted(plan.ranks, "rank"));
    if (const auto& all = settings.setting("num_processes"); all.origin == config::Origin::Flag && all.value != std::to_string(plan.ranks))
      throw ConfigError("--num-processes {} contradicts --nproc-per-node {}; leave one of them out", all.value, plan.ranks);
    if (on_xla) give_devices_to_one_process(plan);
    return plan;
  }
  if (const auto& all = settings.setting("num_processes");
      all.origin == config::Origin::Flag && plan.ranks >= settings.integer("num_processes"))
    throw ConfigError(
        "--num-processes {} is for all nodes together, and --nproc-per-node {} leaves none for the others; leave one of "
        "them out",
        all.value, plan.ranks);
  plan.node = node_of(settings, plan.nodes);
  if (plan.point.host.empty()) {
    throw ConfigError("--nnodes {} needs --rdzv-endpoint HOST:PORT, where node 0 can be reached", plan.nodes);
  }
  if (plan.point.port == 0) plan.point.port = kUsualPort;
  return plan;
}

int launch(const LaunchPlan& plan, const config::Settings& settings, const std::vector<std::string>& remarks) {
  Console console;
  const auto say = [&](const std::string& line) { console.err().write(fmt::format("launch: {}\n", line)); };
  if (!plan.quiet) {
    std::ranges::for_each(origins_of_ranks(settings), say);
    std::ranges::for_each(settings.remarks(), say);
    std::ranges::for_each(remarks, say);
  }
  if (const auto warning = warning_of_unknown_env()) say(*warning);
  const int status = run_attempts(plan, console);
  console.finish();
  if (const auto trouble = console.out().trouble()) {
    console.err().write(fmt::format("launch: standard output {}\n", *trouble));
    console.finish();
    return status != 0 ? status : 1;
  }
  return status;
}

}  // namespace

void add_launch_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("launch", "Starts a program as several ranks, on this host or on several")->group("Commands");
  command->formatter(std::make_shared<HelpWithUsage>("tessera launch --nproc-per-node N PROGRAM ARGS..."));
  const auto flags = std::make_shared<LaunchFlags>();
  command
      ->add_option_function<std::string>(
          "-n,--nproc-per-node", [flags](const std::string& text) { flags->read_ranks(text); },
          "How many ranks on this host, or cpu for one on each core; num_processes / num_machines unless given")
      ->type_name("N");
  command->add_option("--num-cpu-threads-per-process", flags->threads, "OMP_NUM_THREADS of each rank; its part of the cores unless given")
      ->type_name("N")
      ->check(from_to(1, 100'000));
  auto* endpoint = command
                       ->add_option("--rdzv-endpoint", flags->endpoint,
                                    "HOST:PORT where node 0 can be reached by the others, with --nnodes; as --main-process-ip and -port")
                       ->type_name("ENDPOINT");
  command->add_option("--max-restarts", flags->max_restarts, "How often all ranks are started again after a failure")
      ->type_name("N")
      ->capture_default_str()
      ->check(from_to(0, 1'000'000));
  command
      ->add_option("--min-ranks", flags->min_ranks,
                   "Start again without the ranks that were killed, and without nodes that are gone, if so many are left")
      ->type_name("N")
      ->check(from_to(1, 1'000'000))
      ->needs("--max-restarts");
  auto* logs =
      command->add_option("--log-dir", flags->logs, "Keep what each rank prints in FOLDER/RUN/attempt_A/rank_R")->type_name("FOLDER");
  command->add_option("--tee", flags->tee, "What is shown beside the logs")
      ->capture_default_str()
      ->check(one_of({"none", "out", "err", "both"}))
      ->needs(logs);
  command
      ->add_option("--grace,--shutdown-timeout", flags->grace, "How many seconds ranks may still run after a signal that asks them to end")
      ->type_name("S")
      ->capture_default_str()
      ->check(from_to(0, 86'400));
  command->add_option("--node-timeout", flags->node_timeout, "After how many seconds a node that gives no sign of life is lost")
      ->type_name("S")
      ->capture_default_str()
      ->check(from_to(2, 86'400));
  auto* standalone =
      command->add_flag("--standalone", flags->standalone, "All ranks are on this host, as they are unless --nnodes is given");
  command->add_flag("-q,--quiet", flags->quiet, "Of launch itself, print only what goes wrong");
  add_flags_without_effect(*command, flags->remarks);
  const ConfigFlags configuration(*command);
  for (const auto* other : {"--main-process-ip", "--main-process-port"}) endpoint->excludes(command->get_option(other));
  standalone->excludes(endpoint);
  command->prefix_command();
  command->footer(
      "Each line that a rank prints gets its number in front. When a rank fails, the others are stopped, and its error or last words are "
      "repeated; with --max-restarts all begin again, and a program that loads its newest checkpoint goes on. Ctrl-C reaches the ranks; a "
      "second one kills them. Nothing is left behind, whatever becomes of launch. A rank has the cores / N threads in OMP_NUM_THREADS, "
      "unless that is set. Standard input goes to rank 0.\n\n"
      "Examples:\n"
      "  tessera launch --nproc-per-node 2 tessera test\n"
      "  tessera launch --nproc-per-node 4 --max-restarts 3 ./train --resume\n"
      "  tessera launch --config-file run.yaml --mixed-precision bf16 ./train\n"
      "  tessera launch -n 8 --nnodes 2 --node-rank 1 --master-addr node0 ./train\n"
      "\ntorchrun --no-python, mpirun and srun start the same programs.\n\n"
      "Exit status: 0 if that of all ranks is 0, or else that of the rank that failed first; 1 if launch itself failed, 2 if the command "
      "line is wrong, 128 + n after signal n.");
  command->callback([&chosen, command, flags, configuration] {
    const auto settings = configuration.settings(command->count("--nproc-per-node") > 0 ? std::optional(flags->ranks) : std::nullopt);
    const auto plan = plan_of(*command, *flags, settings);
    chosen = [plan, settings, flags] { return launch(plan, settings, *flags->remarks); };
  });
}

}  // namespace tessera::cli
