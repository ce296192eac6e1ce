#include "tessera/data/unigram.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

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

void Unigram::add(const std::string& piece, int32_t id, double score) {
  lowest_ = pieces_.empty() ? score : std::min(lowest_, score);
  longest_ = std::max(longest_, piece.size());
  pieces_[piece] = {id, score};
}

void Unigram::encode(std::string_view word, std::vector<int32_t>& tokens, c10::function_ref<void(std::string_view)> unknown) const {
  constexpr double kPenalty = 10;
  constexpr int32_t kUnknown = -1, kNone = -2;
  struct Best {
    size_t begin = 0;
    double score = 0;
    int32_t id = kNone;
  };
  std::vector<Best> ends(word.size() + 1);  // the best last piece of each beginning of the word
  const auto offer = [&](size_t begin, size_t end, double score, int32_t id) {
    score += ends[begin].score;
    if (ends[end].id == kNone || score > ends[end].score) ends[end] = {begin, score, id};
  };
  for (size_t begin = 0, next = 0; begin < word.size(); begin = next) {
    next = begin + length_of_first(word.substr(begin));
    for (auto end = next; end <= word.size() && end - begin <= longest_; end += end < word.size() ? length_of_first(word.substr(end)) : 1) {
      const auto found = pieces_.find(word.substr(begin, end - begin));
      if (found != pieces_.end())
        offer(begin, end, found->second.score, found->second.id);
      else if (end == next)
        offer(begin, end, lowest_ - kPenalty, kUnknown);
    }
    if (next - begin > longest_) offer(begin, next, lowest_ - kPenalty, kUnknown);
  }
  std::vector<size_t> path;
  for (auto end = word.size(); end > 0; end = ends[end].begin) path.push_back(end);
  size_t known = 0, at = 0;
  const auto end_unknown = [&] {
    if (at > known) unknown(word.substr(known, at - known));
  };
  for (auto end = path.rbegin(); end != path.rend(); at = *end++) {
    if (ends[*end].id == kUnknown) continue;
    end_unknown();
    tokens.push_back(ends[*end].id);
    known = *end;
  }
  end_unknown();
}

}  // namespace tessera::data
