#include "tessera/cli/launch/attempts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>

#include <algorithm>
#include <memory>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/port.h"
#include "tessera/base/secret.h"
#include "tessera/base/words.h"
#include "tessera/cli/launch/core_sets.h"
#include "tessera/cli/launch/held_signals.h"
#include "tessera/cli/launch/nodes.h"
#include "tessera/cli/launch/ranks_here.h"

namespace tessera::cli {
namespace {

/// Whether somebody, or the kernel, has killed the rank that failed first on this host, so that the program itself is perhaps right.
bool was_killed(const Ending& ending) {
  return ending.failed && (ending.status == 128 + SIGKILL || ending.status == 128 + SIGTERM);
}

/// Says how a job that has lost a rank can continue.
std::string way_out(const Share& share) {
  const auto* const by_itself = share.max_restarts == 0 ? ", or let launch restart it: --max-restarts N before the program" : "";
  return fmt::format("a program that has saved checkpoints continues from the newest if it is started again with --resume{}", by_itself);
}

/// Runs one job through all its attempts.
class Attempts {
 public:
  Attempts(const LaunchPlan& plan, Console& console)
      : plan_(plan), console_(console), nodes_(plan.nodes > 1 ? find_others() : nullptr), ranks_(plan.ranks) {}

  Ending run() try {
    for (;;) {
      try {
        if (const auto ending = attempt()) return *ending;
      } catch (const NodeGone& gone) {
        if (!may_come_back_ || plan_.node == 0) throw;
        come_back(gone);
      }
    }
  } catch (const JobEnded& job) {
    say("the job has ended" + (job.ending.report.empty() ? "" : ": " + job.ending.report));
    return job.ending;
  } catch (const Interrupted& interrupted) {
    return {.status = 128 + interrupted.signal, .interrupted = true};
  }

 private:
  struct Interrupted {  // thrown to end run(); not an Error, because nothing is wrong
    int signal;
  };

  /// Returns how all ranks ended, or nothing if there is another attempt.
  std::optional<Ending> attempt() {
    const auto share = nodes_ ? nodes_->meet(ranks_) : lone_share();
    const bool may_restart = may_come_back_ = share.attempt < share.max_restarts;
    auto ending = run_here(share);
    may_come_back_ = may_restart && !ending.interrupted;
    for (const auto& trouble : ending.trouble) say("the log " + trouble);
    if (ending.status == 0 && ending.joined && !ending.read_settings && !plan_.asked_for.empty())
      say(fmt::format("no rank has read the settings, as a Trainer does, so these had no effect: {}", fmt::join(plan_.asked_for, ", ")));
    if (!ending.report.empty()) say(ending.report);
    if (share.min_ranks > 0) ranks_ = std::max(nodes_ ? 1 : 0, ending.ranks);
    ending.ranks = ranks_;
    const auto all = nodes_ ? agree(ending, may_restart) : lone(ending, may_restart);
    if (!all.report.empty() && (ending.report.empty() || all.report.find(ending.report) == std::string::npos)) say(all.report);
    if (!all.why_last.empty()) say(all.why_last);
    if (!all.again && ending.joined && was_killed(ending)) say(way_out(share));
    if (!all.again) return all;
    say(fmt::format("attempt {} of {} begins", share.attempt + 2, share.max_restarts + 1));
    attempt_++;
    return std::nullopt;
  }

  std::unique_ptr<Nodes> find_others() {
    if (!plan_.quiet) say(fmt::format("node {} of {}, meeting at {}:{}", plan_.node, plan_.nodes, plan_.point.host, plan_.point.port));
    return std::make_unique<Nodes>(plan_, hooks());
  }

  Nodes::Hooks hooks() {
    return {.say = [this](const std::string& words) { say(words); }, .wait = [this] { take_signals(); }};
  }

  /// Looks for node 0 again, which waits for this node before the next attempt begins.
  void come_back(const NodeGone& gone) {
    if (interrupted_) throw Interrupted{*interrupted_};
    const auto limit = plan_.node_timeout + plan_.grace;
    agrees_ = false;
    say(fmt::format("{}; trying for {} s to take part in the next attempt", gone.what(), limit.count()));
    nodes_.reset();  // may take as long as a request to node 0
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!nodes_) {
      take_signals();
      try {
        nodes_ = std::make_unique<Nodes>(plan_, hooks(), std::chrono::seconds(1));
      } catch (const TimeoutError&) {
        if (std::chrono::steady_clock::now() >= end) throw NodeGone("{}; it has not come back within {} s", gone.what(), limit.count());
      }
    }
  }

  /// Handles signals while no ranks run here. The first signal that comes while agree() waits for the other nodes is passed on to them; any
  /// other signal ends this launcher.
  void take_signals() {
    while (const auto signal = signals_.take()) {
      if (*signal == SIGTSTP) {
        HeldSignals::stop_for_a_while();
      } else if (*signal != SIGCHLD && *signal != SIGUSR1 && *signal != SIGUSR2) {  // SIGUSR1 and SIGUSR2 have a meaning for ranks only
        if (!agrees_ || interrupted_) throw Interrupted{*signal};
        interrupted_ = signal;
        nodes_->tell(*signal);
      }
    }
  }

  void say(std::string words) {
    if (!words.ends_with('\n')) words += '\n';
    console_.err().write(fmt::format("{}launch: {}", console_.err().fresh_line(), words));
  }

  /// Runs the ranks of this host. If they can't be started, tells the other nodes why, so that they end, too.
  Ending run_here(const Share& share) try {
    introduce(share);
    return LocalJob(job_of(share), console_, signals_).run();
  } catch (const Error& error) {
    if (nodes_) {
      nodes_->tell(0);
      agree({.status = 1, .failed = true, .interrupted = true, .report = error.what()}, false);
    }
    throw;
  }

  Share lone_share() {
    if (run_.empty()) run_ = run_name();
    return {.attempt = attempt_,
            .ranks = ranks_,
            .world_size = ranks_,
            .port = plan_.point.port > 0 ? plan_.point.port : free_port(),
            .secret = random_secret(),
            .run = run_,
            .max_restarts = plan_.max_restarts,
            .min_ranks = plan_.min_ranks};
  }

  /// Decides, for a job whose ranks are all on this host, whether there is another attempt.
  Ending lone(Ending ending, bool may_restart) const {
    ending.again = may_restart && ending.failed && !ending.interrupted;
    if (!ending.again || ranks_ >= std::max(1, plan_.min_ranks)) return ending;
    ending.again = false;
    ending.why_last = too_few_ranks(ranks_, plan_.min_ranks);
    return ending;
  }

  Ending agree(const Ending& own, bool may_restart) {
    agrees_ = true;
    auto all = nodes_->agree(own, may_restart);
    agrees_ = false;
    if (all.again && interrupted_) throw Interrupted{*interrupted_};
    return all;
  }

  void introduce(const Share& share) {
    if (!plan_.logs.empty() && share.attempt == 0) make_folder(logs_of(share));
    if (plan_.quiet) return;
    const auto threads = threads_of(share);
    const auto here = share.nodes == 1 ? std::string() : fmt::format(" of {}", share.world_size);
    const auto devices = plan_.environment.find("TESSERA_XLA_DEVICES");
    const auto who = devices == plan_.environment.end()
                         ? counted(share.ranks, "rank")
                         : fmt::format("1 process with {} of the plugin {}", counted(std::stoi(devices->second), "XLA device"),
                                       env("TESSERA_PJRT_PLUGIN").value_or("cpu"));
    say(fmt::format("{}{} on {}, {} thread{} each ({}){}, port {}", who, here, counted(cores(), "core"), threads, threads == "1" ? "" : "s",
                    plan_.threads == 0 && env("OMP_NUM_THREADS") ? "OMP_NUM_THREADS as it was" : "OMP_NUM_THREADS",
                    plan_.bind ? ", bound to cores" : "", share.port));
    if (!plan_.logs.empty() && share.attempt == 0) say(fmt::format("logs in {}", logs_of(share).string()));
  }

  std::string threads_of(const Share& share) const {
    return plan_.threads > 0 ? std::to_string(plan_.threads) : threads_of_a_rank(share.ranks);
  }

  std::filesystem::path logs_of(const Share& share) const { return plan_.logs.empty() ? plan_.logs : plan_.logs / share.run; }

  Job job_of(const Share& share) {
    return {.command = plan_.command,
            .environment = environment_of(share),
            .first_rank = share.first_rank,
            .ranks = share.ranks,
            .world_size = share.world_size,
            .cores = plan_.bind ? core_sets(processors_in_order(), share.ranks) : std::vector<std::vector<int>>(),
            .logs = logs_of(share),
            .attempt = share.attempt,
            .tee = plan_.tee,
            .grace = plan_.grace,
            .news = nodes_ ? nodes_->news() : -1,
            .tell = [this](int signal) {
              if (nodes_) nodes_->tell(signal);
            }};
  }

  /// Returns the environment of the ranks on this host. Clears the variables of other launchers: if another launcher has started this one,
  /// its variables are not true of these ranks.
  std::map<std::string, std::string> environment_of(const Share& share) const {
    auto environment = plan_.environment;
    for (const auto name : launcher_variables()) environment[std::string(name)] = "";
    environment["TESSERA_CONFIG_FILE"] = "";  // launch has read the file already
    environment["TESSERA_STORE"] = environment["TORCHELASTIC_USE_AGENT_STORE"] = "";
    environment["WORLD_SIZE"] = std::to_string(share.world_size);
    environment["LOCAL_WORLD_SIZE"] = std::to_string(share.ranks);
    environment["GROUP_RANK"] = std::to_string(share.node);
    environment["GROUP_WORLD_SIZE"] = std::to_string(share.nodes);
    environment["MASTER_ADDR"] = share.host;
    environment["MASTER_PORT"] = std::to_string(share.port);
    environment["OMP_NUM_THREADS"] = threads_of(share);
    if (const auto turns = turns_of_a_wait(share.ranks, threads_of(share))) environment["GOMP_SPINCOUNT"] = *turns;
    environment["TESSERA_SECRET"] = share.secret;
    environment["TORCHELASTIC_RUN_ID"] = share.run;
    environment["TORCHELASTIC_RESTART_COUNT"] = std::to_string(share.attempt);
    environment["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(share.max_restarts);
    if (!plan_.gpus.empty()) environment["CUDA_VISIBLE_DEVICES"] = plan_.gpus;
    return environment;
  }

  const LaunchPlan& plan_;
  Console& console_;
  std::unique_ptr<Nodes> nodes_;
  HeldSignals signals_;             // made once the other nodes are found; until then a signal just ends this process
  bool may_come_back_ = false;      // whether there may be another attempt, for which this launcher returns if it loses node 0
  bool agrees_ = false;             // whether agree() waits for the other nodes to say how their ranks have ended
  std::optional<int> interrupted_;  // the signal that came during agree()
  int ranks_;                       // how many ranks of this host take part in the next attempt
  int attempt_ = 0;
  std::string run_;
};

}  // namespace

Ending run_attempts(const LaunchPlan& plan, Console& console) {
  return Attempts(plan, console).run();
}

}  // namespace tessera::cli
