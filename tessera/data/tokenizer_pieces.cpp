// The part of TokenizerCore that encodes as SentencePiece does.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/tokenizer_core.h"

namespace tessera::data {
namespace {

/// Whether a space follows another character.
bool has_inner_space(std::string_view token) {
  for (auto at = token.find(kPieceSpace, 1); at != std::string_view::npos; at = token.find(kPieceSpace, at + 1)) {
    if (!token.substr(0, at).ends_with(kPieceSpace)) return true;
  }
  return false;
}

}  // namespace

/// Returns a merge for each two tokens that make a third, in the order of that one's score.
std::vector<BytePairs::Merge> TokenizerCore::merges_of_scores() const {
  std::vector<int32_t> by_score;
  for (const auto& [token, id] : ids) {
    if (!special.contains(id) && !byte_of_piece(token)) by_score.push_back(id);
  }
  const auto score = [&](int32_t id) { return scores[static_cast<size_t>(id)]; };
  std::ranges::sort(by_score, [&](int32_t left, int32_t right) { return std::pair(-score(left), left) < std::pair(-score(right), right); });
  std::vector<BytePairs::Merge> merges;
  uint32_t rank = 0;
  for (size_t i = 0; i < by_score.size(); i++) {
    if (i > 0 && score(by_score[i]) != score(by_score[i - 1])) rank++;
    const std::string_view token = tokens[static_cast<size_t>(by_score[i])];
    for (auto at = length_of_first(token); at < token.size(); at += length_of_first(token.substr(at))) {
      const auto left = ids.find(token.substr(0, at)), right = ids.find(token.substr(at));
      if (left != ids.end() && right != ids.end()) merges.push_back({left->second, right->second, by_score[i], rank});
    }
  }
  return merges;
}

/// Builds the tables for encoding pieces. Called before added tokens are put beside those of the model.
void TokenizerCore::set_pieces(const std::string& where) {
  if (unknown == -1) throw ConfigError("{}: the unk_token is not in the vocabulary", where);
  if (model == TokenModel::Unigram) {
    if (!unknown) throw ConfigError("{}: Unigram needs an unk_id", where);
    std::vector<Unigram::Piece> pieces;
    for (const auto& [token, id] : ids) {
      const bool is_text = steps.empty() || (!special.contains(id) && !byte_of_piece(token));
      if (is_text && !token.empty()) pieces.push_back({token, id, scores[static_cast<size_t>(id)]});
    }
    unigram.emplace(std::move(pieces), *unknown);
    return;
  }
  std::array<int32_t, 256> none;
  none.fill(BytePairs::kLeftOut);
  const auto learned = scores.empty() ? learned_merges(where) : merges_of_scores();
  pairs.emplace(none, learned);
  const auto crosses = [&](const auto& merge) { return has_inner_space(tokens[static_cast<size_t>(merge.merged)]); };
  cuts_at_spaces = !takes_whole && ids.contains(kPieceSpace) && std::ranges::none_of(learned, crosses);
}

void TokenizerCore::set_byte_pieces() {
  for (int byte = 0; byte < 256; byte++) {
    const auto found = ids.find(piece_of_byte(static_cast<uint8_t>(byte)));
    of_bytes.push_back(found == ids.end() ? -1 : found->second);
  }
  if (std::ranges::all_of(of_bytes, [](int32_t id) { return id < 0; })) of_bytes.clear();
}

/// Encodes a piece of the pre-tokenizer. Words with their spaces are encoded one by one where that makes no difference, so that they can be
/// cached.
void TokenizerCore::encode_piece(std::string_view piece, Scratch& scratch, std::vector<int32_t>& to) const {
  if (!cuts_at_spaces) return encode_word(piece, scratch, to);
  size_t done = 0;
  for (auto at = piece.find(kPieceSpace); at != std::string_view::npos; at = piece.find(kPieceSpace, at + kPieceSpace.size())) {
    if (at == done || piece.substr(0, at).ends_with(kPieceSpace)) continue;
    encode_word(piece.substr(done, at - done), scratch, to);
    done = at;
  }
  if (done < piece.size()) encode_word(piece.substr(done), scratch, to);
}

void TokenizerCore::encode_characters(std::string_view word, std::vector<int32_t>& to) const {
  const auto add_bytes = [&](std::string_view text) {
    const auto token = [&](char byte) { return of_bytes[static_cast<uint8_t>(byte)]; };
    if (of_bytes.empty() || std::ranges::any_of(text, [&](char byte) { return token(byte) < 0; })) return false;
    std::ranges::transform(text, std::back_inserter(to), token);
    return true;
  };
  if (model == TokenModel::Unigram) {
    return unigram->encode(word, to, [&](std::string_view text) {
      const auto found = ids.find(text);
      if (found != ids.end() || !add_bytes(text)) to.push_back(found != ids.end() ? found->second : *unknown);
    });
  }
  const auto begin = to.size();
  bool is_unknown = false;  // whether the token for the characters before is still to be added
  for (size_t at = 0; at < word.size();) {
    const auto character = word.substr(at, length_of_first(word.substr(at)));
    at += character.size();
    if (const auto found = ids.find(character); found != ids.end()) {
      if (is_unknown) to.push_back(*unknown);
      is_unknown = false;
      to.push_back(found->second);
    } else if (!add_bytes(character) && unknown) {
      if (is_unknown && !joins_unknown) to.push_back(*unknown);
      is_unknown = true;
    }
  }
  if (is_unknown) to.push_back(*unknown);
  pairs->merge(to, begin);
}

/// Adds what a GGUF file says of SentencePiece's kinds. Throws ConfigError for all else.
void TokenizerCore::add_pieces_to(BpeVocabulary& vocabulary) const {
  expect_plain_added();
  if (!unnamed.empty()) refuse_place(unnamed);
  vocabulary.model = model == TokenModel::Unigram ? "t5" : "llama";
  vocabulary.spaces = spaces;
  vocabulary.unknown = unknown;
  vocabulary.scores = scores;
  vocabulary.scores.resize(tokens.size());
  // llama.cpp looks for such tokens before it replaces spaces.
  for (const auto& token : added) {
    auto& text = vocabulary.tokens[static_cast<size_t>(token.id)];
    if (!token.special) replacing(nullptr, std::string(kPieceSpace), " ")(text);
  }
  if (!scores.empty()) return;
  // Merges give the order, which a file has as scores: of all two tokens that make a third.
  if (takes_whole) refuse_place("ignore_merges");
  TokenizerCore by_order;
  by_order.tokens = tokens;
  by_order.special = special;
  for (const auto& token : added) by_order.special.insert(token.id);
  by_order.ids = ids;
  by_order.scores.assign(tokens.size(), -static_cast<double>(merges.size()));
  const auto learned = learned_merges("the tokenizer");
  for (auto merge = learned.rbegin(); merge != learned.rend(); merge++)
    by_order.scores[static_cast<size_t>(merge->merged)] = -static_cast<double>(merge->rank);
  std::map<std::pair<int32_t, int32_t>, int32_t> known;
  for (const auto& merge : learned) known[{merge.left, merge.right}] = merge.merged;
  for (const auto& merge : by_order.merges_of_scores()) {
    if (!known.contains({merge.left, merge.right}))
      refuse_place(fmt::format("'{}' is made of '{}' and '{}' by other merges alone", printable(tokens[static_cast<size_t>(merge.merged)]),
                               printable(tokens[static_cast<size_t>(merge.left)]), printable(tokens[static_cast<size_t>(merge.right)])));
  }
  vocabulary.scores = by_order.scores;
  for (const auto& token : added) vocabulary.scores[static_cast<size_t>(token.id)] = 0;
}

}  // namespace tessera::data
