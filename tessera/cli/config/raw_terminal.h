// A terminal that gives each key at once, for as long as an object lives.
#pragma once

#include <optional>

namespace tessera::cli {

/// Standard input becomes raw. The destructor gives it back its state, and so does a signal that ends the process.
class RawTerminal {
 public:
  RawTerminal();
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;
  ~RawTerminal();

  static constexpr char kEnter = '\n', kUp = 'k', kDown = 'j', kInterrupt = 3, kOther = 0;
  /// Waits for a key: its letter, or one of these. Nothing at the end of input.
  std::optional<char> read_key() const;
};

}  // namespace tessera::cli
