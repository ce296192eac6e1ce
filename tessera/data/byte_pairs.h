// Byte pair encoding of single words: merges neighbouring tokens, beginning with single bytes or characters, in the order in which merges
// were learned.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::data {

/// Lets a hash table with std::string keys be searched by string_view.
struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <class Value>
using ByText = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;
using TokenIds = ByText<int32_t>;

class BytePairs {
 public:
  struct Merge {
    int32_t left, right, merged;
    uint32_t rank;  // merges of a lower rank come first; of merges with the same rank, the leftmost
  };
  static constexpr int32_t kLeftOut = -1;  // in `of_bytes`, marks a byte without a token; encode() drops such bytes
  /// `of_bytes`: the token of each byte. Of several merges of one pair the last counts.
  BytePairs(std::span<const int32_t, 256> of_bytes, std::span<const Merge> merges);

  /// Appends the tokens of a word to `tokens`, in nearly linear time.
  void encode(std::string_view word, std::vector<int32_t>& tokens) const;
  /// Replaces the tokens from `begin` on, those of a word's bytes or characters, by the tokens of the word.
  void merge(std::vector<int32_t>& tokens, size_t begin) const;

 private:
  struct Pair {
    uint64_t key = kNone;
    uint32_t rank = 0;
    int32_t merged = 0;
  };
  static constexpr uint64_t kNone = ~uint64_t{0};

  static uint64_t key_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  size_t place_of(uint64_t key) const { return (key * 0x9E3779B97F4A7C15) >> shift_; }
  const Pair* find(int32_t left, int32_t right) const;
  size_t merge_short(std::span<int32_t> parts) const;
  size_t merge_long(std::span<int32_t> tokens) const;

  int32_t of_bytes_[256];
  std::vector<Pair> pairs_;  // a hash table with open addressing
  int shift_ = 0;
};

}  // namespace tessera::data
