// The launchers of several hosts that run one job together. They meet in a store that the launcher of node 0 serves, which also decides.
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

#include "tessera/base/process.h"
#include "tessera/cli/launch/ending.h"
#include "tessera/cli/launch/plan.h"
#include "tessera/cli/launch/ranks_here.h"

namespace c10d {
class Store;
}

namespace tessera::cli {

/// The ranks of this host in an attempt to run a job, and what they need to meet the others.
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

/// Why a job ends: it has fewer ranks than --min-ranks.
std::string too_few_ranks(int left, int least);

class Nodes {
 public:
  struct Hooks {
    std::function<void(const std::string& words)> say;
    std::function<void()> wait;  // called again and again while meet() and agree() wait; what it throws ends them
  };

  /// Connects to node 0; the plan must outlive it. Throws an Error that names the way out.
  Nodes(const LaunchPlan& plan, Hooks hooks);
  Nodes(Nodes&&) = delete;
  ~Nodes();

  /// Waits for the others, which say how many ranks they will start. Throws an Error if not enough of them come.
  Share meet(int ranks);

  /// A byte can be read here when another node has failed (0), or was asked to end by a signal (its number).
  int news() const { return news_.read.get(); }
  /// Tells the other nodes the same of this one.
  void tell(int signal);

  /// Waits until all nodes have said how their ranks ended. `may_restart`: whether another attempt is allowed after a failure.
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
    std::string id;  // of the launcher, which may be another one in the next attempt
  };
  std::map<int, Member> members_;  // of this attempt, by their nodes

  Pipe news_;
  static constexpr int kNothing = -1;
  std::atomic<int> to_tell_ = kNothing;
  std::string why_alone_;               // written before is_alone_
  std::atomic<bool> is_alone_ = false;  // node 0 is gone; whoever asks it next says so
  std::mutex mutex_;                    // guards the members below, which the watcher works with while an attempt runs
  std::condition_variable wake_;
  bool stop_ = false, runs_ = false, told_ = false;
  std::set<int> lost_;
  std::map<int, std::pair<std::string, Clock::time_point>> beats_;  // the last of each node, and when it came
  std::thread watcher_;
};

}  // namespace tessera::cli
