// LocalJob: the ranks of one host as processes that are started, watched and stopped together.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error_record.h"
#include "tessera/base/launch_record.h"
#include "tessera/base/memory_file.h"
#include "tessera/base/process.h"
#include "tessera/cli/launch/ending.h"
#include "tessera/cli/launch/held_signals.h"
#include "tessera/cli/launch/line_relay.h"
#include "tessera/cli/launch/watchdog.h"

namespace tessera::cli {

/// Which output of ranks launch shows, if it also writes logs.
enum class Tee { None, Out, Err, Both };

/// The part of a job that runs on this host.
struct Job {
  std::vector<std::string> command;
  std::map<std::string, std::string> environment = {};  // variables of every rank
  int first_rank = 0, ranks = 1, world_size = 1;
  std::vector<std::vector<int>> cores = {};  // the processors of each rank; empty: any
  std::filesystem::path logs = {};           // the folder of the logs of all attempts; empty: none
  int attempt = 0;
  Tee tee = Tee::Both;
  std::chrono::seconds grace = std::chrono::seconds(10);  // how long ranks may run after a signal was passed on to them
  // The connection to the other hosts of the job. A byte comes through `news` when the ranks here have to end: a signal to pass on, or 0 if
  // ranks of another host have failed. `tell` sends such a byte about the ranks here to the other hosts.
  int news = -1;
  std::function<void(int signal)> tell = [](int) {};
};

class LocalJob {
 public:
  /// Starts the program once for each rank. Each rank is a process group, so that signals also reach the processes that it starts. Adds
  /// RANK, LOCAL_RANK, and the paths of the launch record and of the error file to the environment.
  LocalJob(Job job, Console& console, HeldSignals& signals);

  /// Relays output and signals until all ranks have ended. When a rank fails, the others get a moment to print what they know about the
  /// failure, then SIGTERM, then SIGKILL. On return, some output may still wait in the console.
  Ending run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    Process process;
    std::list<LineRelay> output;  // the last one is standard error
    std::optional<int> status;
    std::string error_path;
    bool stopped = false;                   // launch has stopped this rank
    std::optional<ErrorRecord> error = {};  // the error that this rank has recorded, read at the end
  };
  struct Step {
    Clock::time_point when;
    int signal;
    std::string after = {};  // words of the message about SIGKILL that say when it comes
  };

  void start(int place);
  void wait_for_news();
  void take_news_from_others();
  void take_signals();
  void take_signal(int signal);
  void pass_on(int signal);
  void stop_for_a_while();
  void relay_output();
  void say(std::string_view words);
  void keep_watchdog();
  void reap();
  void find_early_leaver();
  void fail(int rank);
  void stop_soon();
  void name_those_that_still_run(const std::string& after);
  std::string find_culprit();
  std::string report() const;
  void act();
  void send(int signal);
  bool runs() const;
  bool has_ended_well(int rank) const;
  std::vector<int> running() const;
  std::vector<int> stopped() const;
  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank - job_.first_rank)]; }
  const Rank& at(int rank) const { return ranks_[static_cast<size_t>(rank - job_.first_rank)]; }
  int number_of(const Rank& rank) const { return job_.first_rank + static_cast<int>(&rank - ranks_.data()); }

  const Job job_;
  Console& console_;
  HeldSignals& signals_;
  Watchdog watchdog_;
  bool watchdog_missed_ = false;  // the watchdog has ended and could not be started again
  LaunchRecord record_;
  std::list<MemoryFile> error_files_;  // error files in memory, used if there are no logs
  size_t first_relay_ = 0;             // the index of the rank whose output is relayed first
  RecentLines recent_errors_;
  std::vector<Rank> ranks_;
  std::vector<Step> plan_;  // when to send which signal to the ranks that still run
  std::optional<int> interrupted_;
  Clock::time_point interrupted_at_;
  std::optional<int> failed_rank_;  // the rank because of which the job failed
  std::vector<int> left_waiting_;   // the ranks that waited at the start for the failed rank, which ended with status 0
  std::string because_;             // words of the message that name another rank because of which the failed rank failed
  bool ended_from_elsewhere_ = false;
  Ending ending_;
};

}  // namespace tessera::cli
