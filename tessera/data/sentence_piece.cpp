#include "tessera/data/sentence_piece.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/data/unigram.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

// Numbers of fields and of their values, from sentencepiece_model.proto.
enum InModel : uint64_t { kPieces = 1, kTrainer = 2, kNormalizer = 3 };
enum InPiece : uint64_t { kText = 1, kScore = 2, kType = 3 };
enum InTrainer : uint64_t { kKind = 3, kSuffix = 24, kUnknownId = 40, kBosId = 41, kEosId = 42, kPadId = 43 };
enum InNormalizer : uint64_t { kTable = 2, kDummyPrefix = 3, kRemoveExtra = 4, kEscape = 5 };
enum PieceType : uint64_t { kNormalPiece = 1, kUnknownPiece = 2, kControlPiece = 3, kUserPiece = 4 };
constexpr uint64_t kUnigramKind = 1, kPairsKind = 2;

/// A message of protocol buffers, whose fields are read one after the other.
class Message {
 public:
  Message(std::string_view bytes, const fs::path& path) : rest_(bytes), path_(path) {}

  uint64_t field = 0, number = 0;  // of the field that next() has read; number is its value unless it is a text
  std::string_view text;

  bool next() {
    if (rest_.empty()) return false;
    const auto tag = varint();
    field = tag >> 3;
    switch (tag & 7) {
      case 0: number = varint(); return true;
      case 1: return take(8);
      case 2: return take(varint());
      case 5: return take(4);
      default: damaged();
    }
  }
  float real() const {
    float value = 0;
    if (text.size() != sizeof value) damaged();
    std::memcpy(&value, text.data(), sizeof value);
    return value;
  }

 private:
  [[noreturn]] void damaged() const {
    throw IoError("{} is damaged: it is not a whole model of SentencePiece; copy it again, or let transformers make a tokenizer.json", path_);
  }
  bool take(uint64_t size) {
    if (size > rest_.size()) damaged();
    text = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      take(1);
      const auto byte = static_cast<uint8_t>(text[0]);
      value |= uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    damaged();
  }

  std::string_view rest_;
  const fs::path& path_;
};

/// Adds the tokens of the files beside the model.
void add_named(BpeVocabulary& vocabulary, const nlohmann::json& config, const nlohmann::json& added) {
  std::map<int64_t, nlohmann::json> named;
  if (added.is_object()) {
    for (const auto& [token, id] : added.items()) named[id.get<int64_t>()] = {{"content", token}};
  }
  if (config.contains("added_tokens_decoder")) {
    for (const auto& [id, token] : config.at("added_tokens_decoder").items()) {
      int64_t number = -1;
      std::from_chars(id.data(), id.data() + id.size(), number);
      named[number] = token;
    }
  }
  constexpr int64_t kMost = 1 << 24;
  for (const auto& [id, token] : named) {
    if (id < 0 || id > kMost) throw ConfigError("{} can't be the id of an added token", id);
    const auto number = static_cast<int32_t>(id);
    if (static_cast<size_t>(id) >= vocabulary.tokens.size()) vocabulary.tokens.resize(static_cast<size_t>(id) + 1);
    vocabulary.tokens[static_cast<size_t>(id)] = token.at("content").get<std::string>();
    const auto add = [&](std::vector<int32_t>& to, const char* flag, bool standard) {
      std::erase(to, number);
      if (token.value(flag, standard)) to.push_back(number);
    };
    add(vocabulary.added, "", true);
    add(vocabulary.special, "special", true);
    add(vocabulary.rstrip, "rstrip", false);
  }
  vocabulary.scores.resize(vocabulary.tokens.size());
}

}  // namespace

BpeVocabulary read_sentence_piece(const fs::path& path, const nlohmann::json& config, const nlohmann::json& added) {
  const auto bytes = InputFile(path).read_all();
  const auto refuse = [&](const std::string& what) {
    throw ConfigError("{}: {} is not read here; let transformers make a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
                      path, what);
  };
  // The classes of transformers that keep the ids of the model.
  auto name = config.value("tokenizer_class", "LlamaTokenizer");
  for (const std::string_view end : {"Fast", "Tokenizer"}) {
    if (name.ends_with(end)) name.resize(name.size() - end.size());
  }
  constexpr std::string_view kKnown[] = {"Llama", "CodeLlama", "Gemma", "T5", "PreTrained"};
  if (std::ranges::find(kKnown, name) == std::end(kKnown)) refuse("tokenizer_class '" + printable(name) + "Tokenizer', which changes ids,");
  BpeVocabulary result{.tokens = {}, .merges = {}, .added = {}, .special = {}, .pre = {}};
  uint64_t kind = kUnigramKind;
  int32_t unknown = 0, bos = 1, eos = 2, pad = -1;
  result.spaces.merged = true;
  for (Message model(bytes, path); model.next();) {
    Message part(model.text, path);
    if (model.field == kPieces) {
      uint64_t type = kNormalPiece;
      result.tokens.emplace_back();
      result.scores.push_back(0);
      while (part.next()) {
        if (part.field == kText) result.tokens.back() = part.text;
        if (part.field == kScore) result.scores.back() = part.real();
        if (part.field == kType) type = part.number;
      }
      const auto id = static_cast<int32_t>(result.tokens.size()) - 1;
      const bool special = type == kControlPiece || type == kUnknownPiece;
      if (special || type == kUserPiece) result.added.push_back(id);
      if (special) result.special.push_back(id);
    } else if (model.field == kTrainer) {
      while (part.next()) {
        const auto id = static_cast<int32_t>(part.number);
        if (part.field == kKind) kind = part.number;
        if (part.field == kSuffix && part.number != 0) refuse("treat_whitespace_as_suffix");
        if (part.field == kUnknownId) unknown = id;
        if (part.field == kBosId) bos = id;
        if (part.field == kEosId) eos = id;
        if (part.field == kPadId) pad = id;
      }
    } else if (model.field == kNormalizer) {
      while (part.next()) {
        if (part.field == kTable) result.spaces.charsmap = part.text;
        if (part.field == kDummyPrefix) result.spaces.added = part.number != 0;
        if (part.field == kRemoveExtra) result.spaces.merged = part.number != 0;
        if (part.field == kEscape && part.number == 0) refuse("escape_whitespaces false");
      }
    }
  }
  if (result.tokens.empty()) throw IoError("{} is damaged: it has no pieces", path);
  if (kind != kUnigramKind && kind != kPairsKind) refuse("a model of words or characters");
  result.model = kind == kUnigramKind ? "t5" : "llama";
  const auto token = [&](int32_t id) { return id >= 0 && static_cast<size_t>(id) < result.tokens.size() ? std::optional(id) : std::nullopt; };
  result.unknown = token(unknown);
  result.bos = token(bos);
  result.eos = token(eos);
  result.pad = token(pad);
  const bool is_llama = kind == kPairsKind;
  const auto adds = [&](const char* key, bool standard) { return config.contains(key) ? config.at(key) == true : standard; };
  result.add_bos = adds("add_bos_token", is_llama) && result.bos;
  result.add_eos = adds("add_eos_token", !is_llama) && result.eos;
  add_named(result, config, added);
  return result;
}

}  // namespace tessera::data
