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
  std::map<std::string, std::string> environment = {};  // what the configuration says to ranks
  std::vector<std::string> asked_for = {};              // the given keys of it that have no effect unless a rank reads them
  int ranks = 1;                                        // on this host
  int threads = 0;                                      // of each rank; 0: its part of the cores, or what OMP_NUM_THREADS says
  int nodes = 1, node = 0;
  MeetingPoint point = {};  // where nodes meet, if there are several; port 0 is any
  bool bind = false;        // each rank to cores of its own
  std::string gpus = {};    // empty: all
  int max_restarts = 0;     // that of node 0 holds, as its min_ranks
  int min_ranks = 0;        // with fewer there is no further attempt; 0: all are needed
  std::chrono::seconds grace = std::chrono::seconds(10);
  std::chrono::seconds node_timeout = std::chrono::seconds(15);  // then a node that says nothing is lost, and one that was lost stays so
  std::filesystem::path logs = {};
  Tee tee = Tee::Both;
  bool quiet = false;  // launch itself prints only what goes wrong
};

}  // namespace tessera::cli
