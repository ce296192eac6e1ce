// The ranks of this host in an attempt to run a job, and what they need to meet the others.
#pragma once

#include <string>

namespace tessera::cli {

struct Share {
  int attempt = 0;
  int first_rank = 0, ranks = 1, world_size = 1;
  int node = 0, nodes = 1;
  std::string host = "127.0.0.1";  // where rank 0 listens
  int port = 0;
  std::string secret = {};              // without which nobody can join
  std::string run = {};                 // a name of all attempts together
  int max_restarts = 0, min_ranks = 0;  // those of node 0 hold
};

}  // namespace tessera::cli
