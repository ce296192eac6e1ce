// `tessera launch`: makes a LaunchPlan from the flags and the configuration, and runs it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/base/process.h"
#include "tessera/base/run_folder.h"
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

constexpr int kMostSimulated = 65'536;
constexpr size_t kLongestCause = 400;  // bytes
const std::map<std::string, Tee> kTees = {{"none", Tee::None}, {"out", Tee::Out}, {"err", Tee::Err}, {"both", Tee::Both}};

/// Throws ConfigError if another launcher has started this one as one of several ranks, because each of these would start a job of its own.
void refuse_to_be_a_rank() {
  if (const auto size = env("WORLD_SIZE"); size && *size != "1") {
    throw ConfigError(
        "launch starts all ranks itself, but WORLD_SIZE={} says that launch is itself one of several ranks; let the other launcher start "
        "the program, or unset WORLD_SIZE",
        *size);
  }
  const auto identity = identity_from_environment();
  if (!identity || identity->world_size == 1) return;
  throw ConfigError(
      "launch starts all ranks itself, but another launcher has started it as rank {} of {}; let that launcher start the "
      "program",
      identity->rank, identity->world_size);
}

struct LaunchFlags {
  int ranks = 1, threads = 0, grace = 10, node_timeout = 15, max_restarts = 0, min_ranks = 0;
  bool standalone = false, quiet = false, dry_run = false;
  std::string endpoint, logs, record, tee = "both";
  const std::shared_ptr<std::vector<std::string>> remarks = std::make_shared<std::vector<std::string>>();

  /// Reads the value of --nproc-per-node: a number, or one of torchrun's words for it.
  void read_ranks(const std::string& text) {
    if (text == "auto" || text == "cpu") {
      ranks = cores();
      return;
    }
    const auto* const end = text.data() + text.size();
    if (const auto read = std::from_chars(text.data(), end, ranks); read.ec == std::errc() && read.ptr == end) return;
    const bool is_device = text == "gpu" || text == "xpu" || text == "npu" || text == "mtia";
    throw ConfigError("--nproc-per-node '{}' is {}; write a number, or cpu for a rank on each of the {} here", printable(text),
                      is_device ? "not supported here" : "not a number of ranks", counted(cores(), "core"));
  }
};

/// Returns the error for a command line without a number of ranks, which the user may have written after the program.
ConfigError missing_ranks(const std::vector<std::string>& program) {
  const auto is_it = [](const std::string& word) { return word == "-n" || word.starts_with("--nproc"); };
  const bool is_behind = std::ranges::any_of(program, is_it);
  return ConfigError(is_behind ? "--nproc-per-node comes after the program, so the program gets it; write flags of launch before the "
                                 "program: tessera launch --nproc-per-node N PROGRAM ARGS..."
                               : "--nproc-per-node is required, or num_processes in the configuration; see tessera launch --help");
}

/// Returns the number of ranks on this host: the value of --nproc-per-node, or else the host's share of num_processes.
int ranks_of(const CLI::App& command, const LaunchFlags& flags, const config::Settings& settings) {
  const bool given = command.count("--nproc-per-node") > 0;
  if (!given && !settings.is_set("num_processes")) throw missing_ranks(command.remaining());
  const int64_t ranks = given ? flags.ranks : settings.integer("num_processes") / settings.integer("num_machines");
  const int most = flags.dry_run ? kMostSimulated : std::max(64, 4 * cores());
  if (ranks < 1 || ranks > most) {
    throw ConfigError("{} {} is out of range: {}1 to {} ranks are possible", given ? "--nproc-per-node" : "num_processes / num_machines =",
                      ranks, flags.dry_run ? "in a dry run, " : fmt::format("this host has {}, so ", counted(cores(), "core")), most);
  }
  return static_cast<int>(ranks);
}

/// Splits HOST:PORT, [::1]:29500 or HOST alone, and sets the keys of the settings for host and port.
void read_endpoint(const std::string& endpoint, config::Settings& settings) {
  const bool brackets = endpoint.starts_with('[');
  const auto colon = endpoint.ends_with(']') ? std::string::npos : endpoint.rfind(':');
  auto host = endpoint.substr(0, colon);
  if (host.empty() || (brackets ? !host.ends_with(']') : host.find(':') != std::string::npos)) {
    throw ConfigError("--rdzv-endpoint {} is not HOST:PORT, such as node0:29500 or [fe80::1]:29500", endpoint);
  }
  if (brackets) host = host.substr(1, host.size() - 2);
  settings.set("main_process_ip", host, config::Origin::Flag, "--rdzv-endpoint");
  if (colon != std::string::npos) settings.set("main_process_port", endpoint.substr(colon + 1), config::Origin::Flag, "--rdzv-endpoint");
  settings.expect_consistent();
}

/// Returns the number of this node: machine_rank of the flags or the configuration, or else this launcher's rank under another launcher,
/// such as srun with one task on each node.
int node_of(const config::Settings& settings, int nodes) {
  if (settings.is_set("machine_rank")) return static_cast<int>(settings.integer("machine_rank"));
  const auto identity = identity_from_environment();
  if (identity && identity->world_size == nodes) return identity->rank;
  throw ConfigError("--nnodes {} needs --node-rank, 0 to {}, a different one on each node", nodes, nodes - 1);
}

/// Makes the plan start one process with all XLA devices of this host. Each device is a rank.
void give_devices_to_one_process(LaunchPlan& plan) {
  plan.environment["TESSERA_TRANSPORT"] = "xla";
  plan.environment["TESSERA_XLA_DEVICES"] = std::to_string(plan.ranks);
  plan.ranks = 1;
}

/// Returns the keys that were given and have no effect unless the program reads them.
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

/// The folder in which the ranks record the run, if they do.
std::optional<std::filesystem::path> folder_of(const LaunchPlan& plan) {
  const auto given = plan.environment.find(kRunVariable);
  return given != plan.environment.end() ? given->second : run_folder();
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
  if (flags.dry_run) {
    if (on_xla)
      throw ConfigError(
          "--dry-run is for ranks on CPUs and GPUs; what XLA devices need says tessera xla compile --topology NAME -- PROGRAM");
    refuse_to_be_a_rank();
    plan.environment["TESSERA_DRY_RUN"] = fmt::format("{}/{}", plan.ranks * plan.nodes, plan.ranks);
    plan.environment["TESSERA_LOG_WITH"] = "none";
    return plan;
  }
  if (!flags.record.empty()) plan.environment[kRunVariable] = std::filesystem::absolute(flags.record).string();
  if (const auto folder = folder_of(plan)) {
    (void)run_to_continue(*folder, plan.nodes == 1 ? std::optional(plan.ranks) : std::nullopt, 0);
    if (plan.nodes == 1 && is_recorded(*folder))
      throw ConfigError("another job is recording its run in {} now; wait for its end, or record this run in another folder", *folder);
  }
  if (on_xla && plan.nodes > 1)
    throw ConfigError(
        "XLA devices of several nodes can't train together yet: leave --nnodes out, or train on the CPU or on GPUs");
  if (plan.nodes == 1) {
    refuse_to_be_a_rank();
    if (plan.min_ranks > plan.ranks)
      throw ConfigError("--min-ranks {} can't be kept: the job begins with {}", plan.min_ranks, counted(plan.ranks, "rank"));
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

/// Notes in the record of the run how it has ended, unless the folder still has the attempts that it had before.
void note_end(const std::filesystem::path& folder, int before, const Ending& ending,
              const std::function<void(const std::string&)>& say) try {
  if (attempts_in(read_run(folder)) == before) {
    if (ending.status == 0)
      say(fmt::format("nothing is recorded in {}, because the program has not called tessera::init", folder.string()));
    return;
  }
  if (ending.interrupted) return end_run(folder, "interrupted", "");
  if (ending.status == 0) return end_run(folder, "done", "");
  auto cause = printable(ending.report.substr(0, kLongestCause), "\n");
  if (cause.empty()) cause = fmt::format("exit status {}", ending.status);
  std::ranges::replace(cause, '\n', ' ');
  end_run(folder, "failed", cause.substr(0, cause.find_last_not_of(' ') + 1));
} catch (const std::exception& error) {
  say(fmt::format("the record of the run does not say how it ended: {}", error.what()));
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
  if (plan.environment.contains("TESSERA_DRY_RUN")) {
    if (!plan.quiet) say("a dry run: one process simulates all ranks; a program that does not call tessera::init runs as it is");
    console.finish();
    ::unsetenv(kRunVariable);
    for (const auto& [name, value] : plan.environment) ::setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    become(plan.command);
  }
  const auto folder = plan.node == 0 ? folder_of(plan) : std::nullopt;
  const int before = folder ? attempts_in(read_run(*folder)) : 0;
  const auto ending = run_attempts(plan, console);
  const int status = ending.status;
  if (folder) note_end(*folder, before, ending, say);
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
  auto* command = app.add_subcommand("launch", "Starts a program as several ranks, on this host or on several");
  command->formatter(std::make_shared<HelpWithUsage>("tessera launch --nproc-per-node N PROGRAM ARGS..."));
  const auto flags = std::make_shared<LaunchFlags>();
  command
      ->add_option_function<std::string>(
          "-n,--nproc-per-node", [flags](const std::string& text) { flags->read_ranks(text); },
          "How many ranks on this host, or cpu for one on each core; num_processes / num_machines unless given")
      ->type_name("N");
  command->add_option("--num-cpu-threads-per-process", flags->threads, "OMP_NUM_THREADS of each rank; its share of the cores unless given")
      ->type_name("N")
      ->check(from_to(1, 100'000));
  auto* endpoint = command
                       ->add_option("--rdzv-endpoint", flags->endpoint,
                                    "HOST:PORT at which the other nodes reach node 0, with --nnodes; the same as "
                                    "--main-process-ip and --main-process-port")
                       ->type_name("ENDPOINT");
  command->add_option("--max-restarts", flags->max_restarts, "How often all ranks are started again after a failure")
      ->type_name("N")
      ->capture_default_str()
      ->check(from_to(0, 1'000'000));
  command
      ->add_option("--min-ranks", flags->min_ranks,
                   "After a failure, start again without the ranks that were killed and the nodes that are lost, if at least N ranks are "
                   "left")
      ->type_name("N")
      ->check(from_to(1, 1'000'000))
      ->needs("--max-restarts");
  auto* logs =
      command->add_option("--log-dir", flags->logs, "Keep what each rank prints in FOLDER/RUN/attempt_A/rank_R")->type_name("FOLDER");
  command->add_option("--tee", flags->tee, "Which output of ranks is also shown, besides the logs")
      ->capture_default_str()
      ->check(one_of({"none", "out", "err", "both"}))
      ->needs(logs);
  command
      ->add_option("--grace,--shutdown-timeout", flags->grace,
                   "How many seconds ranks may still run after a signal that asks launch to end")
      ->type_name("S")
      ->capture_default_str()
      ->check(from_to(0, 86'400));
  command->add_option("--node-timeout", flags->node_timeout, "After how many seconds without a sign of life a node counts as lost")
      ->type_name("S")
      ->capture_default_str()
      ->check(from_to(2, 86'400));
  command
      ->add_option("--record", flags->record,
                   "Leave the record of the run in FOLDER (TESSERA_RECORD): facts, a line a second, and traces. A run that has failed or "
                   "was interrupted is continued there")
      ->type_name("FOLDER");
  auto* standalone =
      command->add_flag("--standalone", flags->standalone, "All ranks are on this host, which is so in any case unless --nnodes is given");
  auto* dry_run = command->add_flag("--dry-run", flags->dry_run,
                                    "Start one process, which simulates all ranks, of all nodes: it prints units, schedule, memory and "
                                    "time of a step, and ends. A program that does not call tessera::init runs as it is");
  for (const auto* other : {"--record", "--log-dir", "--max-restarts"}) dry_run->excludes(command->get_option(other));
  command->add_flag("-q,--quiet", flags->quiet, "Print no messages of launch itself, except about what goes wrong");
  add_flags_without_effect(*command, flags->remarks);
  const ConfigFlags configuration(*command);
  for (const auto* other : {"--main-process-ip", "--main-process-port"}) endpoint->excludes(command->get_option(other));
  standalone->excludes(endpoint);
  command->prefix_command();
  command->footer(
      "Each line that a rank prints begins with the rank's number. When a rank fails, launch stops the others and repeats the error or the "
      "last lines of the failed rank. With --max-restarts it starts all ranks again; a program that loads its newest checkpoint then "
      "resumes. Ctrl-C is passed on to the ranks; a second one kills them. No process is left behind, even if launch is killed. Unless "
      "OMP_NUM_THREADS is set, each rank gets the cores / N as its value. Standard input goes to rank 0.\n\n"
      "Examples:\n"
      "  tessera launch --nproc-per-node 2 tessera test\n"
      "  tessera launch --nproc-per-node 4 --max-restarts 3 ./train --resume\n"
      "  tessera launch --config-file run.yaml --mixed-precision bf16 ./train\n"
      "  tessera launch -n 8 --nnodes 2 --node-rank 1 --master-addr node0 ./train\n"
      "  tessera launch -n 8 --nnodes 4 --dry-run ./train\n"
      "\ntorchrun --no-python, mpirun and srun start the same programs.\n\n"
      "Exit status: 0 if all ranks end with 0, also after a signal that they take to save and end; or else that of the rank that failed "
      "first, 128 + n if signal n killed it. After signal n to launch, 128 + n if a rank does not end with 0. 1 if launch itself failed, 2 "
      "if the command line is wrong.");
  command->callback([&chosen, command, flags, configuration] {
    const auto settings = configuration.settings(command->count("--nproc-per-node") > 0 ? std::optional(flags->ranks) : std::nullopt);
    const auto plan = plan_of(*command, *flags, settings);
    chosen = [plan, settings, flags] { return launch(plan, settings, *flags->remarks); };
  });
}

}  // namespace tessera::cli
