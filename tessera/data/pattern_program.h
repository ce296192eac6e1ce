// The two forms of a regular expression: the tree that the parser makes, with the syntax of Oniguruma (the library that Hugging Face's
// tokenizers use), and the steps that a matcher with backtracking runs.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
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
  CharacterSet set = {};                // of Set; of Behind, for the previous character
  std::vector<PatternNode> parts = {};  // of all kinds but Set, Behind and Place
  size_t least = 0, most = 0;           // of Repeat
  Mode mode = Mode::Greedy;             // of Repeat
  bool negative = false;                // of Ahead and Behind
  Place place = Place::TextBegin;       // of Place
};

/// Throws ConfigError if the text is not a regular expression, or has a part of Oniguruma's syntax that is not supported.
PatternNode parse_pattern(const std::string& text);

/// The characters of words, as \w, \b and \B see them.
CharacterSet word_characters();

/// A set of characters with a fast look-up.
class CharacterTable {
 public:
  explicit CharacterTable(const CharacterSet& set);

  /// Returns the number of bytes of the UTF-8 character that begins at `at`; 0 if the character is not in the set.
  size_t length_at(const char* at) const {
    const auto known = by_first_byte_[static_cast<uint8_t>(*at)];
    return known == kLook ? look_at(at) : known;
  }
  /// Whether a character that begins with this byte can be in the set.
  bool may_begin_with(uint8_t byte) const { return by_first_byte_[byte] != 0; }

 private:
  static constexpr uint8_t kLook = 0xFF;

  size_t look_at(const char* at) const {
    const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(at[i])); };
    const auto holds = [&](uint32_t character) { return bits_[pages_[character >> 8]][character & 0xFF]; };
    if (byte(0) < 0xE0) return holds((byte(0) & 0x1F) << 6 | (byte(1) & 0x3F)) ? 2 : 0;
    if (byte(0) < 0xF0) return holds((byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F)) ? 3 : 0;
    return holds((byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F)) ? 4 : 0;
  }

  std::array<uint8_t, 256> by_first_byte_{};  // the length if all characters with this first byte are in the set, 0 if none is, or kLook
  std::array<uint16_t, 0x1100> pages_{};      // for each page of 256 characters, its index in bits_
  std::vector<std::bitset<256>> bits_;
};

struct PatternStep {
  enum class Op : uint8_t { Set, Run, Branch, Split, Jump, Ahead, Behind, Atomic, Place, Accept };

  Op op = Op::Accept;
  bool negative = false;                                   // of Ahead and Behind
  PatternNode::Place place = PatternNode::Place::TextEnd;  // of Place
  uint32_t which = 0;                                      // the index of the set of Set, Run and Behind, or of the branch of Branch
  uint32_t target = 0;         // the next step of Jump; the first choice of Split; the step after the part of Ahead and Atomic
  uint32_t other = 0;          // the second choice of Split, if the first one fails
  size_t least = 0, most = 0;  // of Run
  bool keeps = false;          // of Run: whether backtracking never shortens it
};

struct PatternBranch {
  std::array<uint64_t, 257>
      by_byte{};  // for each byte, a bit for each target that can begin with it; the last entry is for the end of the text
  std::vector<uint32_t> targets;
};

struct PatternSteps {
  std::vector<PatternStep> steps;
  std::vector<PatternBranch> branches;
  std::vector<CharacterTable> sets;
  std::bitset<257> begins;  // for each byte, whether a match can begin with it; the last bit: whether a match can be empty
};

/// Throws ConfigError for a pattern that would have too many steps.
PatternSteps steps_of(const PatternNode& pattern);

}  // namespace tessera::data
