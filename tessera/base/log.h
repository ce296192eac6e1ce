// Log messages of the library. The program may redirect them.
#pragma once

#include <functional>
#include <string_view>

#include "tessera/base/format.h"

namespace tessera {

enum class LogLevel { Debug, Info, Warning, Error };

struct LogRecord {
  LogLevel level;
  int rank;  // -1 before the process has one
  std::string_view text;
};

using LogSink = std::function<void(const LogRecord&)>;

/// The default sink: prints a line on standard error.
void print_record(const LogRecord& record);

/// Replaces the sink and returns the previous one. An empty sink means print_record. Any thread may call the sink, but never two threads at
/// the same time.
LogSink set_log_sink(LogSink sink);

/// Drops records below the level from now on, and returns the previous level. The default is Warning, or what TESSERA_LOG names (debug,
/// info, warning, error).
LogLevel set_log_level(LogLevel level);
/// Whether records of the level are not dropped.
bool is_logged(LogLevel level);

/// Sets the rank in the records of this process.
void set_log_rank(int rank);

void log(LogLevel level, std::string_view text);
template <class... Values>
requires(sizeof...(Values) > 0) void log(LogLevel level, FormatString<std::type_identity_t<Values>...> text, const Values&... values) {
  log(level, formatted(text, values...));
}

}  // namespace tessera
