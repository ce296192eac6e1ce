#include "tessera/base/last_words.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/base/error_record.h"

namespace tessera {
namespace {

std::terminate_handler handler_before = nullptr;

[[noreturn]] void end_by_exception() {
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& own) {
      record_error(own.what());
      std::fflush(stdout);  // what the program has said belongs before its end
      // One write, so that lines of several ranks do not interleave.
      const auto line = fmt::format("{}: {}\n", ::program_invocation_short_name, own.what());
      [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
      std::_Exit(1);
    } catch (const std::exception& other) {
      record_error(first_line(other));
    } catch (...) {
    }
  }
  handler_before();
  std::abort();
}

}  // namespace

void say_last_words() {
  static std::once_flag once;
  std::call_once(once, [] { handler_before = std::set_terminate(end_by_exception); });
}

}  // namespace tessera
