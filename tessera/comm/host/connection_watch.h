// ConnectionWatch: ends TCP connections whose other host does not answer any more, so that nobody waits for it until a time limit.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

/// Watches connections that another library has made, and ends each whose other kernel has acknowledged nothing for as long as the limit,
/// though it was sent something. The kernel of a process that computes, or is stopped, still answers: TCP_USER_TIMEOUT would end its
/// connection when its buffers are full.
class ConnectionWatch {
 public:
  /// The connections of this process: descriptors, and the numbers by which the kernel tells connections apart.
  using Connections = std::map<int, uint64_t>;
  static Connections connections();

  /// Watches the connections that were made since `before`.
  ConnectionWatch(const Connections& before, std::chrono::seconds limit);
  ConnectionWatch(ConnectionWatch&&) = delete;
  ~ConnectionWatch();

  /// This host's address in the first of the connections; empty if there is none.
  std::string own_address() const;
  /// Sets the address of each rank, so that failures name ranks.
  void set_addresses(std::vector<std::string> addresses);

  /// Why connections were ended; nothing if none was. While a host is silent, waits until it answers or its connections are ended.
  /// `ranks` of the failure is empty if the address of the host is that of no rank.
  std::optional<LinkFailure> failure();

 private:
  struct Watched {
    int descriptor;
    uint64_t number;
    std::string host;
    Clock::time_point answered = Clock::now();
  };

  void look();

  const std::chrono::seconds limit_;
  std::vector<Watched> watched_;
  mutable std::mutex mutex_;  // guards watched_ and the members below
  std::condition_variable changed_;
  std::vector<std::string> addresses_;
  std::string silent_host_;  // empty until one was silent for too long
  bool in_doubt_ = false;    // a host is silent, but not for too long yet
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tessera
