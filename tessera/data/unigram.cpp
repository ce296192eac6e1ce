#include "tessera/data/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <limits>

#include "tessera/data/unicode.h"

namespace tessera::data {

std::string piece_of_byte(uint8_t byte) {
  return fmt::format("<0x{:02X}>", byte);
}

std::optional<uint8_t> byte_of_piece(std::string_view piece) {
  uint8_t byte = 0;
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece.back() != '>') return std::nullopt;
  const auto* const end = piece.data() + 5;
  return std::from_chars(piece.data() + 3, end, byte, 16).ptr == end ? std::optional(byte) : std::nullopt;
}

Unigram::Unigram(std::vector<Piece> pieces, int32_t unknown) : unknown_(unknown) {
  constexpr double kPenalty = 10;
  std::ranges::stable_sort(pieces, {}, &Piece::text);
  size_t nodes = 1;
  std::string_view before;
  double lowest = std::numeric_limits<double>::infinity();
  for (const auto& piece : pieces) {
    const auto same = static_cast<size_t>(std::ranges::mismatch(piece.text, before).in1 - piece.text.begin());
    nodes += piece.text.size() - same;
    before = piece.text;
    lowest = std::min(lowest, piece.score);
  }
  unknown_score_ = lowest - kPenalty;
  edges_.resize(std::bit_ceil(2 * nodes));
  nodes_.reserve(nodes);
  nodes_.emplace_back();
  for (const auto& piece : pieces) {
    uint32_t node = 0;
    for (const auto byte : piece.text) {
      auto& found = edges_[place_of(node, static_cast<uint8_t>(byte))];
      if (found.from == kNone) {
        found = {node, static_cast<uint8_t>(byte), static_cast<uint32_t>(nodes_.size())};
        nodes_.emplace_back();
      }
      node = found.to;
    }
    nodes_[node] = {piece.id, piece.score};
  }
}

/// Returns the place of the edge from a node, or the free place for it.
size_t Unigram::place_of(uint32_t from, uint8_t byte) const {
  const auto key = uint64_t{from} << 8 | byte;
  auto place = (key * 0x9E3779B97F4A7C15) >> (64 - std::countr_zero(edges_.size()));
  while (edges_[place].from != kNone && (edges_[place].from != from || edges_[place].byte != byte)) place = (place + 1) & (edges_.size() - 1);
  return place;
}

void Unigram::encode(std::string_view word, std::vector<int32_t>& tokens, c10::function_ref<void(std::string_view)> unknown) const {
  constexpr size_t kNowhere = ~size_t{0};
  struct Best {
    size_t begin = kNowhere;
    double score = 0;
    int32_t id = 0;
  };
  std::vector<Best> ends(word.size() + 1);  // the best last piece of each beginning of the word
  const auto offer = [&](size_t begin, size_t end, double score, int32_t id) {
    if (ends[end].begin == kNowhere || score > ends[end].score) ends[end] = {begin, score, id};
  };
  for (size_t begin = 0; begin < word.size();) {
    const auto score = ends[begin].score;
    const auto next = begin + length_of_first(word.substr(begin));
    bool has_single = false;
    uint32_t node = 0;
    for (auto at = begin; at < word.size(); at++) {
      const auto& found = edges_[place_of(node, static_cast<uint8_t>(word[at]))];
      if (found.from == kNone) break;
      node = found.to;
      if (nodes_[node].id < 0) continue;
      offer(begin, at + 1, score + nodes_[node].score, nodes_[node].id);
      has_single = has_single || at + 1 == next;
    }
    if (!has_single) offer(begin, next, score + unknown_score_, unknown_);
    begin = next;
  }
  std::vector<size_t> path;
  for (auto end = word.size(); end > 0; end = ends[end].begin) path.push_back(end);
  size_t known = 0, at = 0;
  for (auto end = path.rbegin(); end != path.rend(); at = *end++) {
    if (ends[*end].id == unknown_) continue;
    if (at > known) unknown(word.substr(known, at - known));
    tokens.push_back(ends[*end].id);
    known = *end;
  }
  if (at > known) unknown(word.substr(known, at - known));
}

}  // namespace tessera::data
