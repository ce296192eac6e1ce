// PrometheusReporter: lets Prometheus scrape the newest numbers of a run, at http://127.0.0.1:PORT/metrics.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "tessera/base/fd.h"
#include "tessera/train/reporter.h"

namespace tessera::train {

/// Each value is a gauge tessera_NAME with the program as the label `run`; tessera_step is the step. Characters that names may not have
/// become '_'. Only programs of this host can connect.
class PrometheusReporter : public Reporter {
 public:
  /// Throws ConfigError if another process has the port.
  static void expect_free(int port);
  /// Throws ConfigError if the port is in use.
  explicit PrometheusReporter(int port, const ReporterOptions& options = {});
  ~PrometheusReporter() override;
  void write(int64_t step, const Values& values) override;

 private:
  void serve() const;
  void answer(const Fd& client) const;
  std::string page() const;

  Fd listener_;  // open only on rank 0
  std::atomic<bool> ended_ = false;
  mutable std::mutex mutex_;
  std::map<std::string, double> newest_;  // guarded by mutex_
  std::thread server_;
};

}  // namespace tessera::train
