// Serves the store in which the ranks of a job meet, and refuses clients that do not know the job's secret.
#pragma once

#include <chrono>
#include <list>
#include <map>
#include <string>
#include <thread>

#include "tessera/base/fd.h"
#include "tessera/comm/host/store_protocol.h"

namespace tessera {

class StoreServer {
 public:
  /// Serves in a thread of its own until it is destroyed.
  StoreServer(Fd listener, std::string secret);
  StoreServer(StoreServer&&) = delete;
  ~StoreServer();

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    Fd socket;
    Clock::time_point since = Clock::now();
    store_protocol::Numbers numbers = {};  // empty until the peer has said hello
    bool admitted = false;
    std::string in = {}, out = {};
    bool gone = false;
  };

  void serve();
  void accept_peers();
  void limit_strangers();
  void read(Peer& peer);
  void greet(Peer& peer);
  void admit(Peer& peer);
  void answer(Peer& peer, store_protocol::Fields request);
  static void flush(Peer& peer);

  Fd listener_;
  const std::string secret_;
  std::map<std::string, std::string> values_;
  std::list<Peer> peers_;  // the oldest first
  Clock::time_point accepts_from_ = {};
  Fd stop_;
  bool has_refused_ = false, has_met_other_version_ = false;
  std::thread thread_;
};

/// Opens a socket that listens at the address of `host`, or at all interfaces if no interface has that address, or if `host` is a name that
/// resolves to loopback and the ranks may be on several hosts. Throws CommError if the port is taken, or if the name can't be resolved
/// before `end`.
Fd listen_at(const std::string& host, int port, bool one_host, std::chrono::steady_clock::time_point end);

/// Whether other hosts can reach a socket that listens.
bool is_open_to_hosts(const Fd& listener);

}  // namespace tessera
