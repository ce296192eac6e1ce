// The ranks of one host as processes: started together, listened to, and stopped together.
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

/// How a job ended: the rank that failed first, if one did, and what the launcher has to end with.
struct Ending {
  int status = 0;
  std::optional<int> failed_rank;
  std::vector<int> stopped;  // those that did not end by themselves
  std::vector<std::string> last_words;
};

class LocalJob {
 public:
  /// Starts the program once for each rank, in a process group of its own, so that what it starts in turn is reached, too. RANK and
  /// LOCAL_RANK are added to the environment, and the file in which ranks say because of which other one they fail.
  LocalJob(const std::vector<std::string>& command, int ranks, const std::map<std::string, std::string>& environment);

  /// Passes output and signals on until all ranks have ended. When one fails, the others get a moment to say what they saw of it, then
  /// SIGTERM, then SIGKILL.
  Ending run();

 private:
  using Clock = std::chrono::steady_clock;
  /// While it lives, signals wait to be read instead of interrupting.
  struct HeldSignals {
    sigset_t before;
    Fd incoming;
    HeldSignals();
    ~HeldSignals();
  };
  struct Rank {
    Process process;
    std::list<LineRelay> output;  // the last is its standard error
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
  std::vector<Step> plan_;  // what becomes of ranks that do not end by themselves
  std::optional<int> interrupted_;
  Ending ending_;
};

}  // namespace tessera::cli
