// A terminal that gives each key at once, for as long as an object lives.
#pragma once

#include <cstdint>
#include <optional>

namespace tessera::cli {

/// Standard input becomes raw. The destructor gives it back its state, and so does a signal that ends the process.
class RawTerminal {
 public:
  RawTerminal();
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;
  ~RawTerminal();

  struct Key {
    enum class Kind { Letter, Up, Down, Enter, Interrupt, Other };
    Kind kind;
    char letter = 0;
  };
  /// Waits for a key; nothing at the end of input.
  std::optional<Key> read_key() const;
};

}  // namespace tessera::cli
