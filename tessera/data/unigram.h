// Unigram, a model of SentencePiece: cuts a word into the pieces whose scores have the largest sum. Also the pieces that stand for bytes.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// How SentencePiece writes a space.
inline constexpr std::string_view kPieceSpace = "\u2581";

/// The piece for a byte, such as <0x0A>, and back.
std::string piece_of_byte(uint8_t byte);
std::optional<uint8_t> byte_of_piece(std::string_view piece);

class Unigram {
 public:
  struct Piece {
    std::string_view text;
    int32_t id;
    double score;
  };
  /// Of several pieces with one text the last counts.
  Unigram(std::vector<Piece> pieces, int32_t unknown);

  /// Appends the tokens of a word. For runs of unknown characters, calls unknown(characters).
  void encode(std::string_view word, std::vector<int32_t>& tokens, c10::function_ref<void(std::string_view)> unknown) const;

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Edge {
    uint32_t from = kNone, byte = 0, to = 0;
  };
  struct Node {
    int32_t id = -1;  // of the piece that ends here
    double score = 0;
  };
  size_t place_of(uint32_t from, uint8_t byte) const;

  std::vector<Node> nodes_;  // of a trie
  std::vector<Edge> edges_;  // a hash table with open addressing
  int32_t unknown_;
  double unknown_score_;
};

}  // namespace tessera::data
