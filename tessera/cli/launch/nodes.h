// Nodes: connects the launchers of several hosts that run one job together. They meet in a store that the launcher of node 0 serves. Node 0
// also decides whether the job is started again.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/base/secret.h"
#include "tessera/cli/launch/ending.h"
#include "tessera/cli/launch/plan.h"
#include "tessera/cli/launch/ranks_here.h"

namespace c10d {
class Store;
}

namespace tessera::cli {

/// This host's share of an attempt to run a job: its ranks, and what they need to meet the ranks of other hosts.
struct Share {
  int attempt = 0;
  int first_rank = 0, ranks = 1, world_size = 1;
  int node = 0, nodes = 1;
  std::string host = "127.0.0.1";  // where rank 0 listens
  int port = 0;
  std::string secret = {};              // a process without the secret can't join
  std::string run = {};                 // the name of the run, the same for all attempts
  int max_restarts = 0, min_ranks = 0;  // node 0's settings, which hold for all nodes
};

/// Returns the message for a job that ends because it has fewer ranks left than --min-ranks.
std::string too_few_ranks(int left, int least);

/// Node 0 does not answer any more: its launcher has ended, or the network between is cut.
struct NodeGone : CommError {
  using CommError::CommError;
};

/// Thrown to a launcher that was started while the job ran, if the job ends before there is another attempt; not an Error, because the
/// ending says whether anything was wrong.
struct JobEnded {
  Ending ending;
};

class Nodes {
 public:
  struct Hooks {
    std::function<void(const std::string& words)> say;
    std::function<void()> wait;  // called repeatedly while meet() or agree() waits; if it throws, the waiting function ends
  };

  /// Connects to node 0. The plan must outlive the object. Throws an Error that says what to do if the connection fails, TimeoutError if
  /// node 0 is not found within the limit.
  Nodes(const LaunchPlan& plan, Hooks hooks, std::chrono::seconds limit = std::chrono::seconds(300));
  Nodes(Nodes&&) = delete;
  ~Nodes();

  /// Begins an attempt with this many ranks on this host: waits for the other nodes and returns this host's share. Throws an Error if not
  /// enough nodes come.
  Share meet(int ranks);

  /// The descriptor from which a byte can be read when another node has failed (0), or was asked to end by a signal (its number).
  int news() const { return news_.read.get(); }
  /// Tells the other nodes that this one has failed (0), or was asked to end by a signal (its number).
  void tell(int signal);

  /// Waits until all nodes have said how their ranks ended, and returns how the attempt ended. `may_restart`: whether another attempt is
  /// allowed after a failure.
  Ending agree(const Ending& own, bool may_restart);

 private:
  using Clock = std::chrono::steady_clock;

  bool decides() const { return plan_.node == 0; }
  std::string key(const std::string& topic) const;
  std::string key(const std::string& topic, int node) const;
  bool is_there(const std::string& key);
  std::string read(const std::string& key);
  void pause() const;
  std::string await(const std::string& key);
  void find_attempt();
  void invite();
  Ending decide(bool may_restart);
  void keep_in_touch();
  void look(c10d::Store& store);
  void watch_others(c10d::Store& store);
  void wake_job(int signal);
  bool is_lost(int node);
  template <class Call>
  auto asking_node_0(Call&& call) const;

  const LaunchPlan& plan_;
  const Hooks hooks_;
  const std::string id_ = random_secret();
  c10::intrusive_ptr<c10d::Store> store_;
  int attempt_ = -1;
  struct Member {
    std::string host;
    std::string id;  // names the launcher process; in the next attempt, the node may have another launcher
  };
  std::map<int, Member> members_;  // the nodes of this attempt, by their numbers

  Pipe news_;
  static constexpr int kNothing = -1;
  std::atomic<int> to_tell_ = kNothing;
  std::string why_alone_;               // written before is_alone_
  std::atomic<bool> is_alone_ = false;  // node 0 is gone; the next call that asks it throws
  std::mutex mutex_;                    // guards the members below, which the watcher's thread uses while an attempt runs
  std::condition_variable wake_;
  bool stop_ = false, runs_ = false, told_ = false;
  std::set<int> lost_;
  std::map<int, std::pair<std::string, Clock::time_point>> beats_;  // the last beat of each node, and when it changed
  std::thread watcher_;
};

}  // namespace tessera::cli
