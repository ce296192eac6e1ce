#include "tessera/base/log.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/launch_record.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 4> kLevelNames = {"debug", "info", "warning", "error"};

/// Whether standard error is a pipe of `tessera launch`, which puts the rank before every line.
bool is_marked_by_launch() {
  struct stat status = {};
  return env(LaunchRecord::kVariable) && ::fstat(STDERR_FILENO, &status) == 0 && S_ISFIFO(status.st_mode);
}

LogLevel level_from_environment() {
  const auto wanted = env("TESSERA_LOG");
  if (!wanted) return LogLevel::Warning;
  for (size_t i = 0; i < kLevelNames.size(); i++) {
    if (*wanted == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  const auto complaint = fmt::format("TESSERA_LOG='{}' is not one of debug, info, warning, error; using warning", *wanted);
  print_record({.level = LogLevel::Warning, .rank = -1, .text = complaint});
  return LogLevel::Warning;
}

struct Logger {
  std::mutex mutex;
  LogSink sink;
  std::atomic<LogLevel> level = level_from_environment();
  std::atomic<int> rank = -1;
};

Logger& logger() {
  static Logger instance;
  return instance;
}

}  // namespace

void print_record(const LogRecord& record) {
  const auto who = record.rank < 0 || is_marked_by_launch() ? std::string() : fmt::format("[rank {}] ", record.rank);
  // One write per line, so that lines of several ranks do not interleave.
  const auto line = fmt::format("tessera: {}{}: {}\n", who, kLevelNames[static_cast<size_t>(record.level)], record.text);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

LogSink set_log_sink(LogSink sink) {
  std::lock_guard lock(logger().mutex);
  return std::exchange(logger().sink, std::move(sink));
}

LogLevel set_log_level(LogLevel level) {
  return logger().level.exchange(level);
}

bool is_logged(LogLevel level) {
  return level >= logger().level;
}

void set_log_rank(int rank) {
  logger().rank = rank;
}

void log(LogLevel level, std::string_view text) {
  auto& self = logger();
  if (level < self.level) return;
  const LogRecord record{.level = level, .rank = self.rank, .text = text};
  std::lock_guard lock(self.mutex);
  self.sink ? self.sink(record) : print_record(record);
}

}  // namespace tessera
