#include "tessera/base/error.h"

#include <type_traits>

namespace tessera {
namespace {

template <class... E>
struct Classes {};

/// Derived classes come before their bases.
using AllClasses = Classes<TimeoutError, DeadlockError, DisagreementError, CommError, UsageError, ConfigError, IoError, Error>;

/// Calls `act` with the number and the type of the exception's class. Exceptions of other libraries count as Error.
template <class Act, class... E>
void with_class_of(const std::exception_ptr& error, Classes<E...>, const Act& act) {
  const auto is_of = [&]<class Class>(std::type_identity<Class>) {
    try {
      std::rethrow_exception(error);
    } catch (const Class&) {
      return true;
    } catch (...) {
      return false;
    }
  };
  char number = 0;
  bool found = false;
  ((!found && (is_of(std::type_identity<E>()) ? (act(number, std::type_identity<E>()), found = true) : (number++, false))), ...);
  if (!found) act(static_cast<char>(sizeof...(E) - 1), std::type_identity<Error>());
}

template <class... E>
[[noreturn]] void throw_class(char number, const std::string& message, Classes<E...>) {
  char each = 0;
  ((each++ == number ? throw E(message) : void()), ...);
  throw Error(message);
}

}  // namespace

char class_number(const std::exception_ptr& error) {
  char result = 0;
  with_class_of(error, AllClasses(), [&](char number, auto) { result = number; });
  return result;
}

void rethrow_as(char class_number, const std::string& message) {
  throw_class(class_number, message, AllClasses());
}

std::exception_ptr with_context(std::string_view where) {
  const auto error = std::current_exception();
  const auto message = std::string(where) + message_of(error);
  std::exception_ptr result;
  with_class_of(error, AllClasses(), [&]<class E>(char, std::type_identity<E>) { result = std::make_exception_ptr(E(message)); });
  return result;
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
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace tessera
