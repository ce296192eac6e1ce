#include "tessera/base/error.h"

namespace tessera {
namespace {

template <class E>
std::exception_ptr renewed(std::string_view where, const E& error) {
  return std::make_exception_ptr(E(std::string(where) + error.what()));
}

}  // namespace

std::exception_ptr with_context(std::string_view where) {
  try {
    throw;
  } catch (const TimeoutError& error) {
    return renewed(where, error);
  } catch (const DeadlockError& error) {
    return renewed(where, error);
  } catch (const DisagreementError& error) {
    return renewed(where, error);
  } catch (const CommError& error) {
    return renewed(where, error);
  } catch (const UsageError& error) {
    return renewed(where, error);
  } catch (const ConfigError& error) {
    return renewed(where, error);
  } catch (const IoError& error) {
    return renewed(where, error);
  } catch (const std::exception& error) {
    return std::make_exception_ptr(Error(std::string(where) + error.what()));
  } catch (...) {
    return std::make_exception_ptr(Error(std::string(where) + "an exception that is no std::exception"));
  }
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
