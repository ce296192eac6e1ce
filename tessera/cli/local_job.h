// The ranks of one host as processes that are started, watched and stopped together.
#pragma once

#include <signal.h>

#include <chrono>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/launch_record.h"
#include "tessera/base/process.h"
#include "tessera/cli/line_relay.h"
#include "tessera/cli/watchdog.h"

namespace tessera::cli {

/// How a job ended.
struct Ending {
  int status = 0;                       // the exit status for the launcher
  std::optional<int> failed_rank;       // the rank because of which the job failed
  std::vector<int> stopped;             // the ranks that the launcher stopped
  std::vector<int> left_waiting;        // the ranks that waited at the start for the failed rank, which ended with status 0
  std::optional<int> left_early;        // a rank that ended with status 0 while the failed rank still needed it
  std::vector<std::string> last_words;  // the last lines of the failed rank's standard error
};

class LocalJob {
 public:
  /// Starts the program once for each rank. Each rank is a process group, so that signals also reach the processes that it starts. Adds
  /// RANK, LOCAL_RANK and the path of the launch record to the environment.
  /// `grace` is how long ranks may still run after a signal that was passed on to them.
  LocalJob(const std::vector<std::string>& command, int ranks, const std::map<std::string, std::string>& environment,
           std::chrono::seconds grace, Console& console);

  /// Relays output and signals until all ranks have ended. When one fails, the others get a moment to print what they know about it, then
  /// SIGTERM, then SIGKILL. Some output may still wait in the console.
  Ending run();

 private:
  using Clock = std::chrono::steady_clock;
  /// As long as it exists, signals are queued in `incoming` instead of interrupting the launcher.
  struct HeldSignals {
    sigset_t before;
    Fd incoming;
    HeldSignals();
    ~HeldSignals();
  };
  struct Rank {
    Process process;
    std::list<LineRelay> output;  // the last one is standard error
    std::optional<int> status;
  };
  struct Step {
    Clock::time_point when;
    int signal;
  };

  void start(const std::vector<std::string>& command, std::map<std::string, std::string> environment);
  void wait_for_news();
  void take_signals();
  void take_signal(int signal);
  void stop_for_a_while();
  void relay_output();
  void say(std::string_view words);
  void keep_watchdog();
  void reap();
  void find_early_leaver();
  void fail(int rank);
  void blame();
  void act();
  void send(int signal);
  bool runs() const;
  bool has_ended_well(int rank) const;
  std::vector<int> running() const;

  const std::chrono::seconds grace_;
  Console& console_;
  HeldSignals signals_;
  Watchdog watchdog_;
  bool watchdog_missed_ = false;  // it has ended and can't be started again
  LaunchRecord record_;
  size_t first_relay_ = 0;  // whose turn it is to write first
  std::vector<Rank> ranks_;
  std::vector<Step> plan_;  // when to send which signal to the ranks that still run
  std::optional<int> interrupted_;
  Clock::time_point interrupted_at_;
  Ending ending_;
};

}  // namespace tessera::cli
