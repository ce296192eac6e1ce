// How an attempt to run a job ended.
#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// How the ranks of one host ended, as its launcher tells the other launchers; or how the ranks of all hosts ended, as the launchers have
/// agreed.
struct Ending {
  int status = 0;                         // the exit status for the launcher
  bool failed = false;                    // a rank has failed, other than by being stopped
  bool noticed = false;                   // a rank of another host caused the failure
  bool interrupted = false;               // the launcher was asked to end
  int ranks = 0;                          // how many ranks could take part in a further attempt
  std::string report = {};                // the message about the failure; may be empty
  bool again = false;                     // there is another attempt
  std::string why_last = {};              // why there is no other attempt, although one was allowed
  std::vector<std::string> trouble = {};  // messages about logs that are not complete
  bool joined = false;                    // a rank has joined a world
  bool read_settings = false;             // a rank has read a configuration
};

}  // namespace tessera::cli
