#include "tessera/data/wordpiece.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/data/unicode.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPad = "[PAD]", kUnknown = "[UNK]", kBegin = "[CLS]", kSeparator = "[SEP]", kMask = "[MASK]";
constexpr std::array kSpecials = {kPad, kUnknown, kBegin, kSeparator, kMask};
constexpr size_t kLongestWord = 100;  // in characters; longer words become [UNK]
constexpr auto kVocabularyFile = "vocab.txt", kConfigFile = "tokenizer_config.json";

/// The place of the first special token in the text, and the token.
std::pair<size_t, std::string_view> find_special(std::string_view text) {
  for (auto at = text.find('['); at != std::string_view::npos; at = text.find('[', at + 1)) {
    for (const auto special : kSpecials) {
      if (text.substr(at).starts_with(special)) return {at, special};
    }
  }
  return {text.size(), {}};
}

/// Removes invisible characters, and replaces all characters that separate words by spaces.
std::u32string cleaned(std::u32string_view text, bool split_ideographs) {
  constexpr char32_t kReplacement = 0xFFFD;
  std::u32string clean;
  for (const auto character : text) {
    if (character == 0 || character == kReplacement || is_control(character)) continue;
    if (is_space(character)) {
      clean.push_back(U' ');
    } else if (split_ideographs && is_ideograph(character)) {
      clean.append({U' ', character, U' '});
    } else {
      clean.push_back(character);
    }
  }
  return clean;
}

/// Reads the configuration of a tokenizer. Options that it lacks keep their defaults.
WordPieceOptions read_options(const fs::path& file) {
  WordPieceOptions options;
  if (!is_there(file)) return options;
  const auto json = nlohmann::json::parse(InputFile(file).read_all(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object", file);
  const auto read = [&](const char* key, auto& to) {
    const auto found = json.find(key);
    if (found == json.end() || found->is_null()) return;
    if (!found->is_boolean()) throw IoError("{}: {} is {} instead of true or false", file, key, found->dump());
    to = found->template get<bool>();
  };
  read("do_lower_case", options.lower_case);
  read("strip_accents", options.strip_accents);
  read("tokenize_chinese_chars", options.split_ideographs);
  return options;
}

/// Removes tokens from the end of the longer text, in turns if both are equally long, until both have `length` tokens together.
void truncate_longest(auto& first, auto& second, int64_t length) {
  auto sizes = std::pair(std::ssize(first), std::ssize(second));
  const auto excess = sizes.first + sizes.second - length;
  if (excess <= 0) return;
  const auto from_longer = std::min(std::abs(sizes.first - sizes.second), excess);
  (sizes.first > sizes.second ? sizes.first : sizes.second) -= from_longer;
  sizes.first -= (excess - from_longer) / 2;
  sizes.second -= (excess - from_longer + 1) / 2;
  first.resize(static_cast<size_t>(sizes.first));
  second.resize(static_cast<size_t>(sizes.second));
}

}  // namespace

WordPiece::WordPiece(std::vector<std::string> vocabulary, const WordPieceOptions& options)
    : vocabulary_(std::move(vocabulary)), options_(options) {
  for (size_t i = 0; i < vocabulary_.size(); i++) numbers_[vocabulary_[i]] = static_cast<int64_t>(i);
  pad_ = special(kPad);
  unknown_ = special(kUnknown);
  begin_ = special(kBegin);
  separator_ = special(kSeparator);
}

int64_t WordPiece::special(std::string_view token) const {
  if (const auto found = numbers_.find(token); found != numbers_.end()) return found->second;
  throw UsageError("a vocabulary of {} tokens lacks {}, which BERT needs", size(), token);
}

WordPiece WordPiece::read(const fs::path& folder) {
  const auto file = folder / kVocabularyFile;
  const auto text = InputFile(file).read_all();
  std::vector<std::string> vocabulary;
  for (size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    auto token = text.substr(at, end - at);
    if (token.ends_with('\r')) token.pop_back();
    if (const auto byte = invalid_utf8(token))
      throw IoError("{}:{}: byte {} of the token is not UTF-8", file, vocabulary.size() + 1, *byte + 1);
    vocabulary.push_back(std::move(token));
    at = end + 1;
  }
  try {
    return WordPiece(std::move(vocabulary), read_options(folder / kConfigFile));
  } catch (const UsageError& error) {
    throw IoError("{}: {}", file, error.what());
  }
}

void WordPiece::write(const fs::path& folder) const {
  make_folder(folder);
  std::string text;
  for (const auto& token : vocabulary_) text += token + "\n";
  write_text(folder / kVocabularyFile, text);
  const auto strip_accents = options_.strip_accents ? nlohmann::ordered_json(*options_.strip_accents) : nlohmann::ordered_json();
  const nlohmann::ordered_json config = {{"tokenizer_class", "BertTokenizer"},
                                         {"do_lower_case", options_.lower_case},
                                         {"strip_accents", strip_accents},
                                         {"tokenize_chinese_chars", options_.split_ideographs}};
  write_text(folder / kConfigFile, config.dump(2) + "\n");
}

WordPiece WordPiece::of_words(std::span<const std::string> texts, int64_t max_words, const WordPieceOptions& options) {
  std::vector<std::string> specials(kSpecials.begin(), kSpecials.end());
  const WordPiece splitter(specials, options);
  std::map<std::u32string, int64_t> counts;
  std::set<char32_t> characters;
  for (const auto& text : texts) {
    for (auto& word : splitter.words_of(characters_of(text))) {
      characters.insert(word.begin(), word.end());
      counts[std::move(word)]++;
    }
  }
  std::vector<std::pair<int64_t, std::u32string>> words;
  for (const auto& [word, count] : counts) {
    if (word.size() > 1) words.emplace_back(-count, word);
  }
  std::ranges::sort(words);
  words.resize(std::min(words.size(), static_cast<size_t>(max_words)));
  auto vocabulary = std::move(specials);
  for (const auto character : characters) {
    const auto piece = to_utf8({&character, 1});
    vocabulary.insert(vocabulary.end(), {piece, "##" + piece});
  }
  for (const auto& [count, word] : words) vocabulary.push_back(to_utf8(word));
  return WordPiece(std::move(vocabulary), options);
}

std::vector<std::string> WordPiece::tokenize(std::string_view text) const {
  std::vector<std::string> tokens;
  while (!text.empty()) {
    const auto [at, special] = find_special(text);
    for (const auto& word : words_of(characters_of(text.substr(0, at)))) add_pieces(word, tokens);
    if (!special.empty()) tokens.emplace_back(special);
    text.remove_prefix(at + special.size());
  }
  return tokens;
}

/// Splits at spaces; each punctuation mark is a word.
std::vector<std::u32string> WordPiece::words_of(std::u32string text) const {
  if (options_.lower_case) text = in_lower_case(text);
  text = normalized(cleaned(text, options_.split_ideographs), NormalForm::Composed);
  if (options_.strip_accents.value_or(options_.lower_case)) {
    text = normalized(text, NormalForm::Decomposed);
    std::erase_if(text, is_accent);
  }
  std::vector<std::u32string> words;
  bool begins = true;
  for (const auto character : text) {
    const bool is_mark = is_punctuation(character);
    if (!is_space(character)) {
      if (begins || is_mark) words.emplace_back();
      words.back().push_back(character);
    }
    begins = is_mark || is_space(character);
  }
  return words;
}

/// Adds the longest piece in the vocabulary with which the word begins, and goes on with the rest of the word.
void WordPiece::add_pieces(std::u32string_view word, std::vector<std::string>& tokens) const {
  std::vector<std::string> pieces;
  while (!word.empty()) {
    auto length = pieces.empty() && word.size() > kLongestWord ? 0 : word.size();
    for (; length > 0; length--) {
      auto piece = (pieces.empty() ? "" : "##") + to_utf8(word.substr(0, length));
      if (!numbers_.contains(piece)) continue;
      pieces.push_back(std::move(piece));
      break;
    }
    if (length == 0) {
      tokens.emplace_back(kUnknown);
      return;
    }
    word.remove_prefix(length);
  }
  std::ranges::move(pieces, std::back_inserter(tokens));
}

WordPiece::Numbers WordPiece::numbers_of(std::string_view text) const {
  Numbers numbers;
  for (const auto& token : tokenize(text)) {
    const auto found = numbers_.find(token);  // the vocabulary may lack [MASK]
    numbers.push_back(found == numbers_.end() ? unknown_ : found->second);
  }
  return numbers;
}

EncodedTexts WordPiece::encode(std::span<const std::string> texts, const EncodeOptions& options) const {
  std::vector<std::pair<Numbers, std::optional<Numbers>>> all;
  for (const auto& text : texts) all.emplace_back(numbers_of(text), std::nullopt);
  return encode(std::move(all), options);
}

EncodedTexts WordPiece::encode(std::span<const std::pair<std::string, std::string>> pairs, const EncodeOptions& options) const {
  std::vector<std::pair<Numbers, std::optional<Numbers>>> all;
  for (const auto& [first, second] : pairs) all.emplace_back(numbers_of(first), numbers_of(second));
  return encode(std::move(all), options);
}

EncodedTexts WordPiece::encode(std::vector<std::pair<Numbers, std::optional<Numbers>>> texts, const EncodeOptions& options) const {
  constexpr int64_t kFewest = 3;  // [CLS] and two of [SEP]
  if (options.max_length < kFewest)
    throw UsageError("texts can't be encoded in {} tokens; give a max_length of at least {}", options.max_length, kFewest);
  int64_t length = options.padding == EncodeOptions::Padding::ToMaxLength ? options.max_length : 0;
  for (auto& [first, second] : texts) {
    Numbers none;
    truncate_longest(first, second ? *second : none, options.max_length - (second ? 3 : 2));
    first.insert(first.begin(), begin_);
    first.push_back(separator_);
    if (second) second->push_back(separator_);
    length = std::max(length, std::ssize(first) + (second ? std::ssize(*second) : 0));
  }
  const std::array sizes = {static_cast<int64_t>(texts.size()), length};
  const auto host = at::TensorOptions(at::kCPU).dtype(at::kLong);
  EncodedTexts encoded{.tokens = at::full(sizes, pad_, host), .types = at::zeros(sizes, host), .mask = at::zeros(sizes, host)};
  for (size_t i = 0; i < texts.size(); i++) {
    const auto place = static_cast<ptrdiff_t>(i) * length;
    const auto& [first, second] = texts[i];
    auto* token = std::ranges::copy(first, encoded.tokens.data_ptr<int64_t>() + place).out;
    auto* const type = encoded.types.data_ptr<int64_t>() + place + std::ssize(first);
    if (second) {
      token = std::ranges::copy(*second, token).out;
      std::fill_n(type, second->size(), 1);
    }
    std::fill(encoded.mask.data_ptr<int64_t>() + place, encoded.mask.data_ptr<int64_t>() + (token - encoded.tokens.data_ptr<int64_t>()), 1);
  }
  return encoded;
}

}  // namespace tessera::data
