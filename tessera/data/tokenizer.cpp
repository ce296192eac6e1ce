#include "tessera/data/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/tokenizer_core.h"

namespace tessera::data {
namespace {

constexpr size_t kMostTokenizers = 8;  // the most tokenizers for which a thread keeps caches of words

std::atomic<uint64_t> tokenizers = 0;

/// GPT-2 writes each byte as a printable character: itself, or one from U+0100 on.
struct ByteLetters {
  std::array<char32_t, 256> letters{};
  std::array<int16_t, 512> bytes{};  // the byte that each letter writes; -1 for letters that write none

  ByteLetters() {
    bytes.fill(-1);
    char32_t next = 256;
    for (int byte = 0; byte < 256; byte++) {
      const bool prints = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      letters[static_cast<size_t>(byte)] = prints ? static_cast<char32_t>(byte) : next++;
      bytes[letters[static_cast<size_t>(byte)]] = static_cast<int16_t>(byte);
    }
  }
};

const ByteLetters& byte_letters() {
  static const ByteLetters letters;
  return letters;
}

}  // namespace

std::string bytes_of_token(const std::string& token) {
  std::string bytes;
  for (const auto letter : characters_of(token)) {
    const auto byte = letter < byte_letters().bytes.size() ? byte_letters().bytes[letter] : -1;
    if (byte < 0) return token;
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

std::string letter_of(int byte) {
  return to_utf8(std::u32string_view(&byte_letters().letters[static_cast<size_t>(byte)], 1));
}

std::string with_spaces(std::string token) {
  for (auto at = token.find(kPieceSpace); at != std::string::npos; at = token.find(kPieceSpace, at)) token.replace(at, kPieceSpace.size(), " ");
  return token;
}

TokenizerCore::Scratch& TokenizerCore::scratch() const {
  static thread_local std::map<uint64_t, Scratch> of_tokenizers;
  const auto found = of_tokenizers.find(number);
  if (found != of_tokenizers.end()) return found->second;
  if (of_tokenizers.size() > kMostTokenizers) of_tokenizers.clear();  // some of these tokenizers may no longer exist
  return of_tokenizers[number];
}

void TokenizerCore::complete() {
  number = ++tokenizers;
  const bool by_bytes = model == TokenModel::BytePairs;
  const auto text_of = [&](const std::string& token) { return by_bytes ? bytes_of_token(token) : with_spaces(token); };
  if (takes_whole) {
    for (const auto& [token, id] : ids) whole.emplace(by_bytes ? bytes_of_token(token) : token, id);
  }
  for (const auto& token : added) {
    if (token.special) special.insert(token.id);
  }
  if (!by_bytes) set_pieces();
  for (const auto& token : added) {
    if (static_cast<size_t>(token.id) >= tokens.size()) tokens.resize(static_cast<size_t>(token.id) + 1);
    tokens[static_cast<size_t>(token.id)] = token.content;
    ids[token.content] = token.id;
  }
  for (const auto& token : tokens) bytes.push_back(text_of(token));
  if (by_bytes) set_bytes();
  for (const auto* ends : {&first, &last}) {
    for (const auto id : *ends) {
      if (static_cast<size_t>(id) >= tokens.size()) throw ConfigError("a text would begin or end with token {}, which is not there", id);
    }
  }
  std::vector<AddedToken> before, in;
  Scratch unused;
  for (auto token : added) {
    // A normalized token is searched for in normalized text.
    if (token.normalized) token.content = normalized(token.content, unused);
    (token.normalized ? in : before).push_back(std::move(token));
  }
  before_form = AddedTokens(std::move(before));
  in_form = AddedTokens(std::move(in));
}

/// Builds the tables for encoding bytes.
void TokenizerCore::set_bytes() {
  std::array<int32_t, 256> of_bytes{};
  for (int byte = 0; byte < 256; byte++) {
    const auto found = ids.find(letter_of(byte));
    if (found == ids.end() && unknown)
      throw ConfigError("there is no token for the byte {:#04x}, and an unk_token in its place is not read here", byte);
    of_bytes[static_cast<size_t>(byte)] = found == ids.end() ? BytePairs::kLeftOut : found->second;
  }
  pairs.emplace(std::span<const int32_t, 256>(of_bytes), learned_merges());
}

/// Builds the tables for encoding characters. Called before added tokens are put beside those of the model.
void TokenizerCore::set_pieces() {
  if (unknown == -1 || (model == TokenModel::Unigram && !unknown)) throw ConfigError("the unk_token is not in the vocabulary");
  // Where no token reaches over the beginning of a run of spaces, words can be encoded one by one, and cached.
  bool crosses = takes_whole || !ids.contains(kPieceSpace);
  const auto look = [&](std::string_view token) {
    while (token.starts_with(kPieceSpace)) token.remove_prefix(kPieceSpace.size());
    crosses = crosses || token.find(kPieceSpace) != std::string_view::npos;
  };
  if (model == TokenModel::Unigram) {
    unigram.emplace();
    for (const auto& [token, id] : ids) {
      const bool is_text = rules == Rules::HuggingFace || (!special.contains(id) && !byte_of_piece(token));
      if (!is_text || token.empty()) continue;
      unigram->add(token, id, scores[static_cast<size_t>(id)]);
      look(token);
    }
  } else {
    std::array<int32_t, 256> none;
    none.fill(BytePairs::kLeftOut);
    const auto learned = learned_merges();
    pairs.emplace(none, learned);
    for (const auto& merge : learned) look(tokens[static_cast<size_t>(merge.merged)]);
  }
  if (!crosses) pre.add({.pattern = Pattern(fmt::format("(?:{})+", kPieceSpace)), .behavior = PreTokenizer::Behavior::BeginsPiece});
}

/// Returns `merges` as ids.
std::vector<BytePairs::Merge> TokenizerCore::learned_merges() const {
  std::vector<BytePairs::Merge> learned;
  learned.reserve(merges.size());
  uint32_t rank = 0;
  for (const auto& merge : merges) {
    const auto space = merge.find(' ');
    const auto id_of = [&](const std::string& token) {
      const auto found = ids.find(token);
      if (space == std::string::npos || found == ids.end())
        throw ConfigError("the merge '{}' has tokens that are not in the vocabulary", printable(merge));
      return found->second;
    };
    const auto left = merge.substr(0, space), right = space == std::string::npos ? "" : merge.substr(space + 1);
    const auto merged = id_of(left + right);
    if (!learned.empty() && (rules == Rules::HuggingFace || learned.back().merged != merged)) rank++;
    learned.push_back({id_of(left), id_of(right), merged, rank});
  }
  return learned;
}

void TokenizerCore::encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& to) const {
  if (scratch.words.find(word, to)) return;
  const auto begin = to.size();
  if (const auto found = whole.find(word); found != whole.end()) {
    to.push_back(found->second);
  } else if (model == TokenModel::BytePairs) {
    pairs->encode(word, to);
  } else {
    encode_characters(word, to);
  }
  scratch.words.add(word, std::span(to).subspan(begin));
}

void TokenizerCore::encode_characters(std::string_view word, std::vector<int32_t>& to) const {
  const auto add_bytes = [&](std::string_view text) {
    const auto begin = to.size();
    for (const auto byte : text) {
      const auto found = falls_back ? ids.find(piece_of_byte(static_cast<uint8_t>(byte))) : ids.end();
      if (found != ids.end()) to.push_back(found->second);
    }
    const bool has_all = to.size() - begin == text.size();
    if (!has_all) to.resize(begin);
    return has_all;
  };
  if (model == TokenModel::Unigram) {
    return unigram->encode(word, to, [&](std::string_view text) {
      const auto found = ids.find(text);
      if (found != ids.end() || !add_bytes(text)) to.push_back(found != ids.end() ? found->second : *unknown);
    });
  }
  const auto begin = to.size();
  bool joins = false;  // whether the token for an unknown character before stands for this one, too
  for (size_t at = 0; at < word.size();) {
    const auto character = word.substr(at, length_of_first(word.substr(at)));
    at += character.size();
    const auto found = ids.find(character);
    const bool is_known = found != ids.end();
    if (is_known) to.push_back(found->second);
    const bool is_unknown = !is_known && !add_bytes(character);
    if (is_unknown && unknown && !joins) to.push_back(*unknown);
    joins = is_unknown && joins_unknown;
  }
  pairs->merge(to, begin);
}

std::string TokenizerCore::normalized(std::string_view text, Scratch& scratch) const {
  std::string result;
  normalizer.each_word(text, PreTokenizer::Place::Begin, scratch.pre, [&](std::string_view piece) { result += piece; });
  return result;
}

void TokenizerCore::encode_plain(std::string_view text, Scratch& scratch, std::vector<int32_t>& to) const {
  using Place = PreTokenizer::Place;
  before_form.cut(text, [&](std::string_view piece, int32_t id) {
    if (id >= 0) return to.push_back(id);
    const bool begins = piece.data() == text.data();
    std::string changed;
    if (!normalizer.steps().empty()) piece = changed = normalized(piece, scratch);
    in_form.cut(piece, [&](std::string_view part, int32_t inner) {
      if (inner >= 0) return to.push_back(inner);
      pre.each_word(part, begins && part.data() == piece.data() ? Place::Begin : Place::Inside, scratch.pre,
                    [&](std::string_view word) { encode_word(word, scratch, to); });
    });
  });
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, Ends ends) const {
  std::vector<int32_t> tokens;
  tokens.reserve(text.size() / 4);  // most texts have no more tokens
  encode(text, tokens, ends);
  return tokens;
}

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& tokens, Ends ends) const {
  std::string replaced;
  if (invalid_utf8(text)) text = replaced = with_replacements(text);
  if (ends == Ends::Added) tokens.insert(tokens.end(), core_->first.begin(), core_->first.end());
  core_->encode_plain(text, core_->scratch(), tokens);
  if (ends == Ends::Added) tokens.insert(tokens.end(), core_->last.begin(), core_->last.end());
}

std::string Tokenizer::decode(std::span<const int32_t> tokens, Special special) const {
  std::string text, single;  // single: bytes that have tokens of their own
  const auto end_single = [&] {
    for (size_t i = invalid_utf8(single) ? single.size() : 0; i > 0; i--) text += "\uFFFD";
    if (!invalid_utf8(single)) text += single;
    single.clear();
  };
  for (const auto token : tokens) {
    if (token < 0 || static_cast<size_t>(token) >= core_->bytes.size())
      throw UsageError("there is no token {}; this tokenizer has {}", token, core_->bytes.size());
    if (special == Special::LeftOut && core_->special.contains(token)) continue;
    const auto& each = core_->bytes[static_cast<size_t>(token)];
    if (const auto byte = core_->joins_bytes ? byte_of_piece(each) : std::nullopt) {
      single += static_cast<char>(*byte);
    } else {
      end_single();
      text += each;
    }
  }
  end_single();
  if (core_->strips_space && text.starts_with(' ')) text.erase(0, 1);
  return invalid_utf8(text) ? with_replacements(text) : text;
}

int64_t Tokenizer::size() const {
  return std::ssize(core_->tokens);
}

std::optional<int32_t> Tokenizer::find(std::string_view token) const {
  const auto found = core_->ids.find(token);
  return found == core_->ids.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace tessera::data
