// Unigram, a model of SentencePiece: cuts a word into the pieces whose scores have the largest sum. Also the pieces that stand for bytes.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/byte_pairs.h"

namespace tessera::data {

/// How SentencePiece writes a space.
inline constexpr std::string_view kPieceSpace = "\u2581";

/// The piece for a byte, such as <0x0A>, and back.
std::string piece_of_byte(uint8_t byte);
std::optional<uint8_t> byte_of_piece(std::string_view piece);

class Unigram {
 public:
  void add(const std::string& piece, int32_t id, double score);

  /// Appends the tokens of a word. For runs of unknown characters, calls unknown(characters).
  void encode(std::string_view word, std::vector<int32_t>& tokens, c10::function_ref<void(std::string_view)> unknown) const;

 private:
  struct Piece {
    int32_t id;
    double score;
  };
  ByText<Piece> pieces_;
  size_t longest_ = 0;
  double lowest_ = 0;  // score
};

}  // namespace tessera::data
