// The plan of a launch: the program, its ranks, and how they are started.
#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/launcher.h"
#include "tessera/cli/launch/local_job.h"

namespace tessera::cli {

/// The job that a command line and a configuration describe.
struct LaunchPlan {
  std::vector<std::string> command = {};
  std::map<std::string, std::string> environment = {};  // variables by which ranks get the configuration
  std::vector<std::string> asked_for = {};              // the given keys that have no effect unless a rank reads the configuration
  int ranks = 1;                                        // the number of ranks on this host
  int threads = 0;                                      // threads of each rank; 0: OMP_NUM_THREADS, or the rank's share of the cores
  int nodes = 1, node = 0;
  MeetingPoint point = {};  // where nodes meet, if there are several; port 0 is any free one
  bool bind = false;        // binds each rank to cores of its own
  std::string gpus = {};    // the GPUs that ranks may use; empty: all
  int max_restarts = 0;     // node 0 decides: its max_restarts and min_ranks count
  int min_ranks = 0;        // with fewer ranks there is no further attempt; 0: all are needed
  std::chrono::seconds grace = std::chrono::seconds(10);
  std::chrono::seconds node_timeout = std::chrono::seconds(15);  // after which a silent node is lost; a new attempt waits as long for it
  std::filesystem::path logs = {};
  Tee tee = Tee::Both;
  bool quiet = false;  // launch itself prints only what goes wrong
};

}  // namespace tessera::cli
