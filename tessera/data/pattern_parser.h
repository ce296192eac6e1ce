// Regular expressions as the library Oniguruma reads them, with which Hugging Face's library cuts texts into words.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "tessera/data/character_set.h"

namespace tessera::data {

inline constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

/// A part of a regular expression.
struct PatternNode {
  enum class Kind { Set, Sequence, Choice, Repeat, Ahead, Behind, Atomic, Place };
  enum class Mode { Greedy, Lazy, Possessive };
  enum class Place { LineBegin, LineEnd, TextBegin, TextEnd, LastLineEnd, WordEdge, InWord };

  Kind kind = Kind::Sequence;
  CharacterSet set = {};                // of Set, and of Behind: of the character before
  std::vector<PatternNode> parts = {};  // of all others but Place
  size_t least = 0, most = 0;           // of Repeat
  Mode mode = Mode::Greedy;             // of Repeat
  bool negative = false;                // of Ahead and Behind
  Place place = Place::TextBegin;       // of Place
};

/// Throws ConfigError if the text is not a regular expression, or has something of Oniguruma's that is not read here.
PatternNode parse_pattern(const std::string& text);

/// The characters that \w, \b and \B take for those of words.
CharacterSet word_characters();

}  // namespace tessera::data
