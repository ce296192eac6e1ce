// RawTerminal: makes the terminal deliver each key at once, as long as the object lives.
#pragma once

#include <optional>

namespace tessera::cli {

/// Puts standard input into raw mode. The destructor restores its state, and so does a signal that ends the process.
class RawTerminal {
 public:
  RawTerminal();
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;
  ~RawTerminal();

  static constexpr char kEnter = '\n', kUp = 'k', kDown = 'j', kInterrupt = 3, kOther = 0;
  /// Waits for a key and returns its letter, or one of these constants; nothing at the end of input.
  std::optional<char> read_key() const;
};

}  // namespace tessera::cli
