#include "tessera/data/sentence_piece.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

// Numbers of fields and of their values, from sentencepiece_model.proto.
enum InModel : uint64_t { kPieces = 1, kTrainer = 2, kNormalizer = 3 };
enum InPiece : uint64_t { kText = 1, kScore = 2, kType = 3 };
enum InTrainer : uint64_t { kKind = 3, kSuffix = 24, kUnknownId = 40, kBosId = 41, kEosId = 42, kPadId = 43 };
enum InNormalizer : uint64_t { kTable = 2, kDummyPrefix = 3, kRemoveExtra = 4, kEscape = 5 };
enum PieceType : uint64_t { kUnknownPiece = 2, kControlPiece = 3, kUserPiece = 4 };
constexpr uint64_t kUnigramKind = 1, kPairsKind = 2;

/// A message of protocol buffers.
class Message {
 public:
  /// Throws IoError if it is not whole.
  Message(std::string_view bytes, const fs::path& path) : rest_(bytes), path_(path) {
    while (!rest_.empty()) {
      const auto tag = varint();
      Field field{.id = tag >> 3};
      switch (tag & 7) {
        case 0: field.number = varint(); break;
        case 1: field.text = take(8); break;
        case 2: field.text = take(varint()); break;
        case 5: field.text = take(4); break;
        default: damaged();
      }
      fields.push_back(field);
    }
  }

  struct Field {
    uint64_t id = 0, number = 0;  // the number is the value unless that is a text
    std::string_view text = {};
  };
  std::vector<Field> fields;

  Field last(uint64_t id, uint64_t standard = 0) const {
    const auto found = std::find_if(fields.rbegin(), fields.rend(), [&](const Field& field) { return field.id == id; });
    return found == fields.rend() ? Field{.number = standard} : *found;
  }
  double real(uint64_t id) const {
    float value = 0;
    const auto text = last(id).text;
    if (text.size() == sizeof value) std::memcpy(&value, text.data(), sizeof value);
    return value;
  }

 private:
  [[noreturn]] void damaged() const {
    throw IoError("{} is damaged: it is not a whole model of SentencePiece; copy it again", path_);
  }
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) damaged();
    const auto text = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return text;
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1).front());
      value |= uint64_t{byte & 0x7FU} << shift;
      if (byte < 0x80) return value;
    }
    damaged();
  }

  std::string_view rest_;
  const fs::path& path_;
};

}  // namespace

BpeVocabulary read_sentence_piece(const fs::path& path, const nlohmann::json& config) {
  const auto bytes = InputFile(path).read_all();
  const Message model(bytes, path);
  const Message trainer(model.last(kTrainer).text, path), normalizer(model.last(kNormalizer).text, path);
  const auto kind = trainer.last(kKind, kUnigramKind).number;
  const bool is_llama = kind == kPairsKind;
  // The classes of transformers that keep the ids of the model.
  constexpr std::string_view kKnown[] = {"Llama", "CodeLlama", "Gemma", "T5", "PreTrained"};
  const auto name = config.value("tokenizer_class", "LlamaTokenizer");
  if ((!is_llama && kind != kUnigramKind) || trainer.last(kSuffix).number != 0 || normalizer.last(kEscape, 1).number == 0 ||
      std::ranges::find(kKnown, name.substr(0, name.find("Tokenizer"))) == std::end(kKnown))
    throw ConfigError("{}: only BPE and Unigram with spaces before words, and of transformers' classes only those that keep its ids, are read "
                      "here, not {}: let transformers make a tokenizer.json", path, printable(name));
  BpeVocabulary result{.tokens = {}, .merges = {}, .added = {}, .special = {}, .pre = {}, .model = is_llama ? "llama" : "t5"};
  for (const auto& field : model.fields) {
    if (field.id != kPieces) continue;
    const Message piece(field.text, path);
    const auto type = piece.last(kType).number;
    const auto id = static_cast<int32_t>(result.tokens.size());
    if (type == kControlPiece || type == kUnknownPiece) result.special.push_back(id);
    if (type == kControlPiece || type == kUnknownPiece || type == kUserPiece) result.added.push_back(id);
    result.tokens.emplace_back(piece.last(kText).text);
    result.scores.push_back(piece.real(kScore));
  }
  if (result.tokens.empty()) throw IoError("{} is damaged: it has no pieces", path);
  const auto token = [&](uint64_t field, uint64_t standard) {
    const auto id = trainer.last(field, standard).number;
    return id < result.tokens.size() ? std::optional(static_cast<int32_t>(id)) : std::nullopt;
  };
  result.unknown = token(kUnknownId, 0);
  result.bos = token(kBosId, 1);
  result.eos = token(kEosId, 2);
  result.pad = token(kPadId, result.tokens.size());
  result.add_bos = config.value("add_bos_token", is_llama) && result.bos;
  result.add_eos = config.value("add_eos_token", !is_llama) && result.eos;
  result.spaces = {.added = normalizer.last(kDummyPrefix, 1).number != 0,
                   .merged = normalizer.last(kRemoveExtra, 1).number != 0,
                   .charsmap = std::string(normalizer.last(kTable).text)};
  return result;
}

}  // namespace tessera::data
