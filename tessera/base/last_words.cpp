#include "tessera/base/last_words.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/error_record.h"

namespace tessera {
namespace {

constexpr const char* kShowCalls = "TORCH_SHOW_CPP_STACKTRACES";  // a variable of libtorch

std::terminate_handler handler_before = nullptr;

// The unit that this thread has used last. Has a fixed size, so that entering a unit allocates nothing; longer names lose their beginnings.
thread_local std::array<char, 120> last_place = {};

[[noreturn]] void end_with(const std::string& message) {
  record_error(message);
  std::fflush(stdout);  // so that the program's output comes before the error
  // One write, so that lines of several ranks do not interleave.
  const auto line = fmt::format("{}: {}\n", ::program_invocation_short_name, message);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  std::_Exit(1);
}

bool wants_calls() {
  return env(kShowCalls) == "1";
}

[[noreturn]] void end_by_exception() {
  if (const auto error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const Error& own) {
      end_with(own.what());
    } catch (const c10::Error& theirs) {
      auto message = message_without_calls(theirs);
      if (last_place.front() != '\0') message += fmt::format("; the part of the model that this thread used last is {}", last_place.data());
      if (!wants_calls()) message += fmt::format(" ({}=1 shows the calls)", kShowCalls);
      end_with(message);
    } catch (const std::exception& other) {
      record_error(first_line(other));
    } catch (...) {
    }
  }
  handler_before();
  std::abort();
}

}  // namespace

void note_place(std::string_view phase, std::string_view unit) {
  const auto length = std::min(unit.size(), last_place.size() - 40);
  const auto end = fmt::format_to_n(last_place.data(), last_place.size() - 1, "'{}' ({})", unit.substr(unit.size() - length), phase);
  *end.out = '\0';
}

std::string message_without_calls(const c10::Error& error) {
  std::string text = wants_calls() ? error.what() : error.what_without_backtrace();
  while (text.ends_with('\n') || text.ends_with('.')) text.pop_back();
  return text;
}

void say_last_words() {
  static std::once_flag once;
  std::call_once(once, [] { handler_before = std::set_terminate(end_by_exception); });
}

}  // namespace tessera
