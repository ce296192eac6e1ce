// What the library has to say, and where it goes. The host program may take it over.
#pragma once

#include <functional>
#include <string_view>

namespace tessera {

enum class LogLevel { Debug, Info, Warning, Error };

struct LogRecord {
  LogLevel level;
  int rank;  // -1 before the process has one
  std::string_view text;
};

using LogSink = std::function<void(const LogRecord&)>;

/// Replaces the sink and returns the one before. An empty sink stands for the default: a line on standard error.
/// Records come from any thread, one at a time.
LogSink set_log_sink(LogSink sink);

/// Records below the level are dropped. The default is Warning, or what TESSERA_LOG names (debug, info, warning, error).
LogLevel set_log_level(LogLevel level);

/// The rank that records of this process carry.
void set_log_rank(int rank);

void log(LogLevel level, std::string_view text);

}  // namespace tessera
