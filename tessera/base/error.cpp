#include "tessera/base/error.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

#include "tessera/base/last_words.h"

namespace tessera {
namespace {

struct ErrorClass {
  bool (*has)(const std::exception& error);
  std::exception_ptr (*make)(const std::string& message);
};

template <class E>
constexpr ErrorClass kClassOf = {
    .has = [](const std::exception& error) { return dynamic_cast<const E*>(&error) != nullptr; },
    .make = [](const std::string& message) { return std::make_exception_ptr(E(message)); },
};

/// Derived classes come before their bases. The last class, Error, also represents exceptions of other libraries.
constexpr std::array kClasses = {kClassOf<TimeoutError>, kClassOf<DeadlockError>, kClassOf<DisagreementError>, kClassOf<CommError>,
                                 kClassOf<UsageError>,   kClassOf<ConfigError>,   kClassOf<IoError>,           kClassOf<Error>};

const ErrorClass& class_at(char number) {
  return kClasses[std::min(static_cast<size_t>(number), kClasses.size() - 1)];
}

}  // namespace

// The first Error that is made installs the terminate handler, which reports an Error that nobody catches.
Error::Error(std::string message) : message_(std::move(message)) {
  say_last_words();
}

char class_number(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return static_cast<char>(std::ranges::find_if(kClasses, [&](const ErrorClass& each) { return each.has(known); }) - kClasses.begin());
  } catch (...) {
    return static_cast<char>(kClasses.size());
  }
}

void rethrow_as(char class_number, const std::string& message) {
  std::rethrow_exception(class_at(class_number).make(message));
}

std::exception_ptr with_context(std::string_view where) {
  const auto error = std::current_exception();
  return class_at(class_number(error)).make(std::string(where) + message_of(error));
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  auto line = text.substr(0, text.find('\n'));
  if (line.ends_with('.')) line.pop_back();
  return line;
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return message_without_calls(known);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace tessera
