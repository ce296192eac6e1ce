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

bool adds_bos(std::string_view pre) {
  const auto* known = find_pre_tokenizer(pre);
  return known != nullptr && known->takes_whole;
}

void refuse_place(const std::string& part) {
  throw ConfigError("{}, which has no place there", part);
}

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

TokenizerCore::Scratch& TokenizerCore::scratch() const {
  static thread_local std::map<uint64_t, Scratch> of_tokenizers;
  const auto found = of_tokenizers.find(number);
  if (found != of_tokenizers.end()) return found->second;
  if (of_tokenizers.size() > kMostTokenizers) of_tokenizers.clear();  // some of these tokenizers may no longer exist
  return of_tokenizers[number];
}

/// Builds the tables for encoding from tokens, merges and added tokens.
void TokenizerCore::complete(const std::string& where) {
  number = ++tokenizers;
  if (takes_whole) {
    for (const auto& [token, id] : ids) whole.emplace(model == TokenModel::BytePairs ? bytes_of_token(token) : token, id);
  }
  if (model != TokenModel::BytePairs) set_pieces(where);
  for (const auto& token : added) {
    if (token.id < 0) throw ConfigError("{}: the token '{}' has the id {}", where, printable(token.content), token.id);
    if (static_cast<size_t>(token.id) >= tokens.size()) tokens.resize(static_cast<size_t>(token.id) + 1);
    tokens[static_cast<size_t>(token.id)] = token.content;
    ids[token.content] = token.id;
    if (token.special) special.insert(token.id);
  }
  if (model == TokenModel::BytePairs) set_bytes(where);
  for (const auto* ends : {&first, &last}) {
    for (const auto id : *ends) {
      if (static_cast<size_t>(id) >= tokens.size())
        throw ConfigError("{}: a text would begin or end with token {}, which is not there", where, id);
    }
  }
  std::vector<AddedToken> before, in;
  for (auto token : added) {
    // A normalized token is searched for in normalized text.
    if (token.normalized) token.content = normalized(token.content);
    (token.normalized ? in : before).push_back(std::move(token));
  }
  before_form = AddedTokens(std::move(before));
  in_form = AddedTokens(std::move(in));
}

/// Builds the tables for encoding bytes.
void TokenizerCore::set_bytes(const std::string& where) {
  for (const auto& token : tokens) bytes.push_back(bytes_of_token(token));
  std::array<int32_t, 256> of_bytes{};
  for (int byte = 0; byte < 256; byte++) {
    const auto found = ids.find(letter_of(byte));
    if (found == ids.end() && unknown)
      throw ConfigError("{}: there is no token for the byte {:#04x}, and an unk_token in its place is not read here", where, byte);
    of_bytes[static_cast<size_t>(byte)] = found == ids.end() ? BytePairs::kLeftOut : found->second;
  }
  pairs.emplace(std::span<const int32_t, 256>(of_bytes), learned_merges(where));
}

/// Returns `merges` as ids.
std::vector<BytePairs::Merge> TokenizerCore::learned_merges(const std::string& where) const {
  std::vector<BytePairs::Merge> learned;
  learned.reserve(merges.size());
  for (const auto& merge : merges) {
    const auto space = merge.find(' ');
    const auto id_of = [&](const std::string& token) {
      const auto found = ids.find(token);
      if (space == std::string::npos || found == ids.end())
        throw ConfigError("{}: the merge '{}' has tokens that are not in the vocabulary", where, printable(merge));
      return found->second;
    };
    const auto left = merge.substr(0, space), right = space == std::string::npos ? "" : merge.substr(space + 1);
    learned.push_back({id_of(left), id_of(right), id_of(left + right), static_cast<uint32_t>(learned.size())});
  }
  return learned;
}

/// Throws ConfigError if a program that only knows the name of the pre-tokenizer, as in a GGUF file, would encode texts differently.
void TokenizerCore::expect_like(const KnownPreTokenizer& known) const {
  if (form != known.form || normalizer.size() != (form ? 1U : 0U)) {
    const auto* name = !normalizer.empty() && !form    ? "other steps than a normal form"
                       : !form                         ? "no normal form"
                       : *form == NormalForm::Composed ? "the normal form NFC"
                                                       : "the normal form NFD";
    refuse_place(fmt::format("with its pre-tokenizer {}, the normalizer has {}", known.name, name));
  }
  expect_plain_added();
  if (takes_whole == known.takes_whole) return;
  // With and without ignore_merges, a tokenizer differs only for words that are tokens but can't be made by merges.
  std::vector<int32_t> parts;
  for (const auto& [token, id] : ids) {
    if (std::ranges::find(added, id, &AddedToken::id) != added.end()) continue;
    parts.clear();
    pairs->encode(bytes[static_cast<size_t>(id)], parts);
    if (parts.size() != 1)
      refuse_place(fmt::format("with its pre-tokenizer {}, ignore_merges is {}, and '{}' is a token by that alone", known.name, takes_whole,
                               printable(token)));
  }
}

/// Throws ConfigError for added tokens, and ends of texts, that a GGUF file can't say.
void TokenizerCore::expect_plain_added() const {
  const bool by_bytes = model == TokenModel::BytePairs;
  if (first.size() > 1 || last.size() > 1) refuse_place("texts begin or end with several tokens");
  for (const auto& token : added) {
    const auto* flag = token.lstrip                                       ? "lstrip"
                       : token.rstrip && by_bytes                         ? "rstrip"
                       : token.single_word                                ? "single_word"
                       : token.normalized && by_bytes && !normalizer.empty() ? "normalized"
                                                                          : nullptr;
    if (flag != nullptr) refuse_place(fmt::format("the added token '{}' has {}", printable(token.content), flag));
  }
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

std::string TokenizerCore::normalized(std::string_view text) const {
  std::string result(text);
  for (const auto& step : normalizer) step(result);
  return result;
}

void TokenizerCore::encode_plain(std::string_view text, Scratch& scratch, std::vector<int32_t>& to) const {
  using Place = PreTokenizer::Place;
  before_form.cut(text, [&](std::string_view piece, int32_t id) {
    if (id >= 0) return to.push_back(id);
    const bool begins = piece.data() == text.data();
    std::string changed;
    if (!normalizer.empty()) piece = changed = normalized(piece);
    in_form.cut(piece, [&](std::string_view part, int32_t inner) {
      if (inner >= 0) return to.push_back(inner);
      pre->each_word(part, begins && part.data() == piece.data() ? Place::Begin : Place::Inside, scratch.pre,
                     [&](std::string_view word) { encode_piece(word, scratch, to); });
    });
  });
}

std::shared_ptr<TokenizerCore> core_of(const BpeVocabulary& vocabulary) {
  auto core = std::make_shared<TokenizerCore>();
  core->tokens = vocabulary.tokens;
  core->merges = vocabulary.merges;
  const std::unordered_set<int32_t> special(vocabulary.special.begin(), vocabulary.special.end());
  const std::unordered_set<int32_t> rstrip(vocabulary.rstrip.begin(), vocabulary.rstrip.end());
  const auto expect_there = [&](int32_t id) {
    if (id < 0 || static_cast<size_t>(id) >= core->tokens.size())
      throw ConfigError("a vocabulary of {} tokens has no token {}", core->tokens.size(), id);
  };
  for (const auto id : vocabulary.added) {
    expect_there(id);
    core->added.push_back(
        {.content = core->tokens[static_cast<size_t>(id)], .id = id, .special = special.contains(id), .rstrip = rstrip.contains(id)});
  }
  for (size_t id = 0; id < core->tokens.size(); id++) core->ids.emplace(core->tokens[id], static_cast<int32_t>(id));
  if (vocabulary.model == "gpt2") {
    const auto* known = find_pre_tokenizer(vocabulary.pre);
    if (known == nullptr)
      throw ConfigError("there is no pre-tokenizer '{}' here; those that are: {}", printable(vocabulary.pre), names_of_pre_tokenizers());
    std::vector<PreTokenizer::Step> steps;
    for (const auto& pattern : known->patterns) steps.push_back({.pattern = Pattern(pattern)});
    core->pre.emplace(std::move(steps));
    if ((core->form = known->form)) core->normalizer.push_back(normalizing(*core->form));
    core->takes_whole = known->takes_whole;
  } else {
    core->take_pieces(vocabulary);
  }
  if (!vocabulary.chat_template.empty()) core->files[kChatTemplateFile] = vocabulary.chat_template;
  for (const auto& [name, id] : {std::pair("bos_token", vocabulary.bos),
                                 {"eos_token", vocabulary.eos},
                                 {"pad_token", vocabulary.pad},
                                 {"unk_token", vocabulary.unknown}}) {
    if (!id) continue;
    expect_there(*id);
    core->named[name] = core->tokens[static_cast<size_t>(*id)];
  }
  const auto end_of = [](std::optional<int32_t> id, const char* name) {
    if (!id) throw ConfigError("texts begin or end with {}, but the vocabulary does not say which token that is", name);
    return std::vector{*id};
  };
  if (vocabulary.add_bos) core->first = end_of(vocabulary.bos, "bos");
  if (vocabulary.add_eos) core->last = end_of(vocabulary.eos, "eos");
  core->complete("the vocabulary");
  return core;
}

Tokenizer::Tokenizer(const BpeVocabulary& vocabulary) : core_(core_of(vocabulary)) {}

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
  const bool by_pieces = core_->model != TokenModel::BytePairs;
  const auto& all = by_pieces ? core_->tokens : core_->bytes;
  std::string bytes;
  std::vector<std::string> pieces;
  for (const auto token : tokens) {
    if (token < 0 || static_cast<size_t>(token) >= all.size())
      throw UsageError("there is no token {}; this tokenizer has {}", token, all.size());
    if (special == Special::LeftOut && core_->special.contains(token)) continue;
    const auto& each = all[static_cast<size_t>(token)];
    if (!by_pieces)
      bytes += each;
    else if (!each.empty())
      pieces.push_back(each);
  }
  for (const auto& step : core_->decoder) step(pieces);
  for (const auto& piece : pieces) bytes += piece;
  return invalid_utf8(bytes) ? with_replacements(bytes) : bytes;
}

int64_t Tokenizer::size() const {
  return std::ssize(core_->tokens);
}

std::optional<int32_t> Tokenizer::find(std::string_view token) const {
  const auto found = core_->ids.find(token);
  return found == core_->ids.end() ? std::nullopt : std::optional(found->second);
}

BpeVocabulary Tokenizer::vocabulary() const {
  BpeVocabulary result{
      .tokens = core_->tokens, .merges = {}, .added = {}, .special = {}, .pre = {}, .chat_template = core_->chat_template()};
  if (core_->model == TokenModel::BytePairs) {
    const auto* known = find_pre_tokenizer(*core_->pre);
    if (known == nullptr)
      throw ConfigError("its pre-tokenizer is not one of those that a GGUF file can name: {}", names_of_pre_tokenizers());
    core_->expect_like(*known);
    result.merges = core_->merges;
    result.pre = known->name;
  } else {
    core_->add_pieces_to(result);
  }
  for (const auto& token : core_->added) {
    result.added.push_back(token.id);
    if (token.special) result.special.push_back(token.id);
    if (token.rstrip) result.rstrip.push_back(token.id);
  }
  if (!core_->first.empty()) {
    result.bos = core_->first.front();
    result.add_bos = true;
  }
  if (!core_->last.empty()) {
    result.eos = core_->last.front();
    result.add_eos = true;
  }
  return result;
}

}  // namespace tessera::data
