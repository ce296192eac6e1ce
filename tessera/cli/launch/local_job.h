// The ranks of one host as processes that are started, watched and stopped together.
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
#include "tessera/cli/launch/held_signals.h"
#include "tessera/cli/launch/line_relay.h"
#include "tessera/cli/launch/watchdog.h"

namespace tessera::cli {

/// Which output of ranks launch shows, beside the logs.
enum class Tee { None, Out, Err, Both };

/// The part of a job that runs on this host.
struct Job {
  std::vector<std::string> command;
  std::map<std::string, std::string> environment = {};  // of every rank
  int first_rank = 0, ranks = 1, world_size = 1;
  std::vector<std::vector<int>> cores = {};  // the processors of each rank; empty: any
  std::filesystem::path logs = {};           // of all attempts; empty: none
  int attempt = 0;
  Tee tee = Tee::Both;
  std::chrono::seconds grace = std::chrono::seconds(10);  // for ranks that got a signal that was passed on
  // The other hosts of the job. A byte comes through `news` when ranks here shall end: a signal to pass on, or 0 if ranks there have
  // failed. `tell` says the same of the ranks here.
  int news = -1;
  std::function<void(int signal)> tell = [](int) {};
};

/// How a job ended.
struct Ending {
  int status = 0;                       // the exit status for the launcher
  std::optional<int> failed_rank;       // the rank because of which the job failed
  std::optional<int> elsewhere;         // a rank of another host because of which that one failed
  std::optional<int> still_ran;         // a rank because of which that one failed, and that the launcher had to stop
  std::vector<int> stopped;             // the ranks that the launcher stopped
  std::vector<int> left_waiting;        // the ranks that waited at the start for the failed rank, which ended with status 0
  std::optional<int> left_early;        // a rank that ended with status 0 while the failed rank still needed it
  std::optional<ErrorRecord> error;     // what the failed rank has recorded
  std::vector<std::string> last_words;  // the last lines of the failed rank's standard error
  std::vector<std::string> trouble;     // logs that are not complete
  int killed = 0;                       // ranks that kill -9 has ended, by hand or because memory ran out
  bool interrupted = false;             // the launcher was asked to end
  bool ended_from_elsewhere = false;    // ranks were stopped because of another host
  bool joined = false;                  // a rank has joined a world
  bool read_settings = false;           // a rank has read a configuration
};

class LocalJob {
 public:
  /// Starts the program once for each rank. Each rank is a process group, so that signals also reach the processes that it starts. Adds
  /// RANK, LOCAL_RANK, and the paths of the launch record and of the error file to the environment.
  LocalJob(Job job, Console& console, HeldSignals& signals);

  /// Relays output and signals until all ranks have ended. When one fails, the others get a moment to print what they know about it, then
  /// SIGTERM, then SIGKILL. Some output may still wait in the console.
  Ending run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    Process process;
    std::list<LineRelay> output;  // the last one is standard error
    std::optional<int> status;
    std::string error_path;
    bool stopped = false;
  };
  struct Step {
    Clock::time_point when;
    int signal;
    std::string after = {};  // of SIGKILL: when it comes, for the message
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
  void blame();
  void act();
  void send(int signal);
  bool runs() const;
  bool has_ended_well(int rank) const;
  std::vector<int> running() const;
  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank - job_.first_rank)]; }
  const Rank& at(int rank) const { return ranks_[static_cast<size_t>(rank - job_.first_rank)]; }
  int number_of(const Rank& rank) const { return job_.first_rank + static_cast<int>(&rank - ranks_.data()); }

  const Job job_;
  Console& console_;
  HeldSignals& signals_;
  Watchdog watchdog_;
  bool watchdog_missed_ = false;  // it has ended and can't be started again
  LaunchRecord record_;
  std::list<MemoryFile> error_files_;  // where there are no logs
  size_t first_relay_ = 0;             // whose turn it is to write first
  RecentLines recent_errors_;
  std::vector<Rank> ranks_;
  std::vector<Step> plan_;  // when to send which signal to the ranks that still run
  std::optional<int> interrupted_;
  Clock::time_point interrupted_at_;
  Ending ending_;
};

}  // namespace tessera::cli
