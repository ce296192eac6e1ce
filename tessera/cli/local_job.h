// The ranks of one host as processes that are started, watched and stopped together.
#pragma once

#include <signal.h>

#include <chrono>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/failure_record.h"
#include "tessera/base/process.h"
#include "tessera/cli/line_relay.h"
#include "tessera/cli/watchdog.h"

namespace tessera::cli {

/// How a job ended.
struct Ending {
  int status = 0;                       // the exit status for the launcher
  std::optional<int> failed_rank;       // the rank because of which the job failed
  std::vector<int> stopped;             // the ranks that the launcher stopped
  std::vector<std::string> last_words;  // the last lines of the failed rank's standard error
};

class LocalJob {
 public:
  /// Starts the program once for each rank. Each rank is a process group, so that signals also reach the processes that it starts. Adds
  /// RANK, LOCAL_RANK and the path of the failure record to the environment.
  LocalJob(const std::vector<std::string>& command, int ranks, const std::map<std::string, std::string>& environment);

  /// Relays output and signals until all ranks have ended. When one fails, the others get a moment to print what they know about it, then
  /// SIGTERM, then SIGKILL.
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
  bool pump();
  int culprit_behind(int rank) const;
  void reap();
  void act();
  void send(int signal);
  bool runs() const;

  HeldSignals signals_;
  Watchdog watchdog_;
  FailureRecord failures_;
  std::vector<Rank> ranks_;
  std::vector<Step> plan_;  // when to send which signal to the ranks that still run
  std::optional<int> interrupted_;
  Ending ending_;
};

}  // namespace tessera::cli
