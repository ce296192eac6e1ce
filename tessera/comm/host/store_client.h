// StoreClient: a rank's connection to the store that rank 0 serves.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/fd.h"
#include "tessera/comm/host/store_protocol.h"

namespace tessera {

/// Throws std::runtime_error if the connection is lost, as other stores of c10d do, or if an answer has not come within the store's time
/// limit (setTimeout). The callers say in their errors what that means.
class StoreClient final : public c10d::Store {
 public:
  using Clock = std::chrono::steady_clock;

  /// Tries to connect until `end`, and tells `on_failure` why an attempt failed. Throws TimeoutError with the reason of the last attempt,
  /// ConfigError if the secret is wrong.
  StoreClient(
      std::string host, int port, std::string secret, Clock::time_point end,
      const std::function<void(const std::string& why)>& on_failure = [](const std::string&) {});

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

 private:
  std::string request(const store_protocol::Fields& fields);

  std::string host_;
  const int port_;
  const std::string secret_;
  std::mutex mutex_;
  Fd socket_;
  std::string received_;
};

}  // namespace tessera
