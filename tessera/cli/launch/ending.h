// How an attempt to run a job ended.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// Of the ranks of one host, as its launcher tells it to those of other hosts; or of all ranks, as the launchers have agreed.
struct Ending {
  int status = 0;                         // the exit status for the launcher
  bool failed = false;                    // a rank has failed, and not only been stopped
  bool noticed = false;                   // it failed because of a rank of another host
  bool interrupted = false;               // the launcher was asked to end
  int ranks = 0;                          // that could take part in a further attempt
  std::string report = {};                // what is said of it; empty if there is nothing to say
  bool again = false;                     // of the job: there is another attempt
  std::string why_last = {};              // of the job: why there is none, although one was allowed
  std::vector<std::string> trouble = {};  // logs that are not complete
  bool joined = false;                    // a rank has joined a world
  bool read_settings = false;             // a rank has read a configuration
};

}  // namespace tessera::cli
