// The errors of the library. One root, few children: callers catch by what they can do about it.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace tessera {

/// Root of all errors that Tessera throws. The message names the thing that failed and the way out.
class Error : public std::exception {
 public:
  explicit Error(std::string message) : message_(std::move(message)) {}

  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// The program calls the library in a way that can't work. The same on every rank that hears of it.
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

/// A rank waited as long as it was allowed to.
class TimeoutError : public CommError {
  using CommError::CommError;
};

/// Ranks came to a collective with different wishes. All of them hear of it, and may go on.
class DisagreementError : public CommError {
  using CommError::CommError;
};

/// All ranks wait for each other, each for something else.
class DeadlockError : public CommError {
  using CommError::CommError;
};

/// For a handler: the exception that it handles, as a new one of the same kind with words before its message ("rank 2: "). What other
/// libraries throw becomes an Error.
std::exception_ptr with_context(std::string_view where);

/// What an exception of libtorch says, without the stack trace that its message goes on with and without a full stop at the end.
std::string first_line(const std::exception& error);

/// The message of an exception that is at hand as a pointer.
std::string message_of(const std::exception_ptr& error);

}  // namespace tessera
