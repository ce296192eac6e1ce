// The errors of the library: one root and few children, one for each way in which a caller can react.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "tessera/base/format.h"

namespace tessera {

/// Root of all errors that Tessera throws. The message names the thing that failed and the way out.
class Error : public std::exception {
 public:
  explicit Error(std::string message);
  /// Formats the message: UsageError("there is no parameter {} in {}", name, folder).
  template <class... Values>
  requires(sizeof...(Values) > 0) explicit Error(FormatString<std::type_identity_t<Values>...> message, const Values&... values)
      : Error(formatted(message, values...)) {}

  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// The program calls the library in a way that can't work. Every rank that gets the error gets the same message.
class UsageError : public Error {
  using Error::Error;
};

/// A setting, an environment variable or a command-line flag is missing or wrong.
class ConfigError : public Error {
  using Error::Error;
};

/// A file or another resource of the operating system could not be used.
class IoError : public Error {
  using Error::Error;
};

/// Ranks could not work together: they disagree, or one of them is gone.
class CommError : public Error {
  using Error::Error;
};

/// A wait reached its time limit.
class TimeoutError : public CommError {
  using CommError::CommError;
};

/// Ranks called different collectives, or the same one with different arguments. All of them get the error, and may continue.
class DisagreementError : public CommError {
  using CommError::CommError;
};

/// All ranks wait for each other, and none can continue.
class DeadlockError : public CommError {
  using CommError::CommError;
};

/// Returns a copy of the exception that is being handled, of the same class, with `where` ("rank 2: ") before its message. An exception of
/// another library becomes an Error. Call it only in a catch block.
std::exception_ptr with_context(std::string_view where);

/// Returns a number for the exception's class; rethrow_as() throws an exception of the class with that number. A rank sends its number to
/// the others, so that they throw an error of the same class.
char class_number(const std::exception_ptr& error);
[[noreturn]] void rethrow_as(char class_number, const std::string& message);

/// The first line of an exception's message, without a full stop at its end. In exceptions of libtorch a stack trace follows that line.
std::string first_line(const std::exception& error);

/// The exception's message.
std::string message_of(const std::exception_ptr& error);

}  // namespace tessera
