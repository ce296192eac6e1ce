// Warnings: collects log messages for tests.
#pragma once

#include <string>
#include <vector>

#include "tessera/base/log.h"
#include "tessera/base/no_copy.h"

namespace tessera::testing {

/// Collects the texts that are logged while it lives, and keeps them from being printed.
class Warnings : NoCopy {
 public:
  Warnings() : before_(set_log_sink([this](const LogRecord& record) { texts.emplace_back(record.text); })) {}
  ~Warnings() { set_log_sink(before_); }

  std::vector<std::string> texts;

 private:
  LogSink before_;
};

}  // namespace tessera::testing
