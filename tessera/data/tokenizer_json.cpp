// Reads tokenizer.json as Hugging Face's library does.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <set>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/data/pattern.h"
#include "tessera/data/sentence_piece.h"
#include "tessera/data/tokenizer_core.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Step = PreTokenizer::Step;
using Behavior = PreTokenizer::Behavior;
using Prefix = PreTokenizer::Prefix;

constexpr auto kMostTokens = 1 << 24;
constexpr auto kLetTransformersMakeIt = "let transformers make it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)";
const std::map<std::string, Behavior> kBehaviors = {{"Isolated", Behavior::Isolated},
                                                    {"Removed", Behavior::Removed},
                                                    {"MergedWithNext", Behavior::BeginsPiece},
                                                    {"MergedWithPrevious", Behavior::EndsPiece}};
const std::map<std::string, Prefix> kPrefixes = {
    {"never", Prefix::Never}, {"always", Prefix::IfMissing}, {"first", Prefix::IfMissingFirst}};
constexpr std::string_view kDigits64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

std::string of_base64(std::string_view text) {
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const auto letter : text) {
    const auto digit = kDigits64.find(letter);
    if (digit == std::string_view::npos) break;  // = at the end
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if ((count += 6) >= 8) bytes += static_cast<char>(bits >> (count -= 8));
  }
  return bytes;
}

/// Returns the value that goes with a name in a file.
template <class Value>
Value named(const std::map<std::string, Value>& values, const Json& name) {
  const auto found = values.find(name.get<std::string>());
  if (found == values.end()) throw ConfigError("{} is not read here", printable(name.dump()));
  return found->second;
}

Prefix prefix_of(const Json& metaspace) {
  return named(kPrefixes, metaspace.value("prepend_scheme", metaspace.value("add_prefix_space", true) ? "always" : "never"));
}

Pattern pattern_of(const Json& json) {
  const auto& pattern = json.at("pattern");
  if (pattern.contains("Regex")) return Pattern(pattern.at("Regex").get<std::string>());
  return Pattern::of_text(pattern.at("String").get<std::string>());
}

int32_t id_of(const Json& number) {
  const auto id = number.get<int64_t>();
  if (id < 0 || id >= kMostTokens) throw ConfigError("{} can't be the id of a token", id);
  return static_cast<int32_t>(id);
}

/// Reads tokenizer.json.
class TokenizerFile {
 public:
  TokenizerFile(const Json& json, TokenizerCore& core) : json_(json), core_(core) {
    core_.normalizer = PreTokenizer(steps_of("normalizer", "normalizers"));
    core_.pre = PreTokenizer(steps_of("pre_tokenizer", "pretokenizers"));
    in_part("model", [&](const Json& json) { read_model(json); });
    in_part("added_tokens", [&](const Json& json) {
      for (const auto& token : json) read_added(token);
    });
    each_of("post_processor", "processors", [&](const std::string& type, const Json& json) { read_ends(type, json); });
    each_of("decoder", "decoders", [&](const std::string& type, const Json& json) { read_decoder(type, json); });
  }

 private:
  /// Calls act() with a part of the file, or null. Errors name the part.
  void in_part(const std::string& name, const auto& act) const try {
    const auto found = json_.find(name);
    static const Json nothing;
    act(found == json_.end() ? nothing : *found);
  } catch (const ConfigError&) {
    std::rethrow_exception(with_context(name + ": "));
  }

  [[noreturn]] static void refuse(const std::string& type) { throw ConfigError("'{}' is not read here", printable(type)); }

  /// Calls act(type, json) for a part, or, if it is a Sequence, for each part in its list. Does nothing for null.
  void each_of(const std::string& name, const char* list, const auto& act) const {
    const std::function<void(const Json&)> visit = [&](const Json& json) {
      if (json.is_null()) return;
      const auto type = json.at("type").get<std::string>();
      type == "Sequence" ? std::ranges::for_each(json.at(list), visit), void() : act(type, json);
    };
    in_part(name, visit);
  }

  /// Reads a normalizer or a pre-tokenizer.
  std::vector<Step> steps_of(const std::string& name, const char* list) const {
    std::vector<Step> steps;
    each_of(name, list, [&](const std::string& type, const Json& json) {
      if (type == "NFC" || type == "NFD") {
        steps.push_back({.form = type == "NFC" ? NormalForm::Composed : NormalForm::Decomposed});
      } else if (type == "Precompiled") {
        const auto table = of_base64(json.at("precompiled_charsmap").is_null() ? "" : json.at("precompiled_charsmap").get<std::string>());
        const auto match = core_.rules == Rules::HuggingFace ? Charsmap::Match::Graphemes : Charsmap::Match::Longest;
        if (!table.empty()) steps.push_back({.charsmap = std::make_shared<Charsmap>(table, match)});
      } else if (type == "Prepend") {
        steps.push_back({.prefix = Prefix::Always, .by = json.at("prepend")});
      } else if (type == "Replace") {
        steps.push_back({.pattern = pattern_of(json), .behavior = Behavior::Replaced, .by = json.at("content")});
      } else if (type == "Strip") {
        if (json.value("strip_left", true)) steps.push_back({.pattern = Pattern(kWhiteBegin), .behavior = Behavior::Replaced});
        if (json.value("strip_right", true)) steps.push_back({.pattern = Pattern(kWhiteEnd), .behavior = Behavior::Replaced});
      } else if (type == "Metaspace") {
        const auto space = json.value("replacement", std::string(kPieceSpace));
        steps.push_back({.pattern = Pattern::of_text(" "), .behavior = Behavior::Replaced, .by = space});
        steps.push_back({.behavior = Behavior::BeginsPiece, .prefix = prefix_of(json), .by = space});
        if (json.value("split", true)) steps.back().pattern = Pattern::of_text(space);
      } else if (type == "WhitespaceSplit") {
        steps.push_back({.pattern = Pattern(kWhite), .behavior = Behavior::Removed});
      } else if (type == "Digits") {
        steps.push_back({.pattern = Pattern(json.value("individual_digits", false) ? kDigitPattern : kDigitsPattern)});
      } else if (type == "Split" && !json.value("invert", false)) {
        steps.push_back({.pattern = pattern_of(json), .behavior = named(kBehaviors, json.at("behavior"))});
      } else if (type == "ByteLevel") {
        core_.model = TokenModel::BytePairs;
        if (json.value("add_prefix_space", true)) steps.push_back({.prefix = Prefix::IfMissing, .by = " "});
        if (json.value("use_regex", true)) steps.push_back({.pattern = Pattern(kGpt2Pattern)});
      } else {
        refuse(type);
      }
    });
    return steps;
  }

  void read_decoder(const std::string& type, const Json& json) {
    static const std::set<std::string> of_bytes = {"ByteLevel", "Fuse"}, of_pieces = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"};
    if (!(core_.model == TokenModel::BytePairs ? of_bytes : of_pieces).contains(type)) refuse(type);
    if (type == "ByteFallback") core_.joins_bytes = true;
    if (type == "Strip" || (type == "Metaspace" && prefix_of(json) != Prefix::Never)) core_.strips_space = true;
  }

  void read_model(const Json& json) {
    if (json.is_null()) throw ConfigError("it is missing");
    const bool by_bytes = core_.model == TokenModel::BytePairs;
    const auto type = json.value("type", json.at("vocab").is_array() ? "Unigram" : "BPE");
    if (type != "BPE" && (type != "Unigram" || by_bytes)) refuse(type);
    for (const auto* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout", by_bytes ? "byte_fallback" : ""}) {
      const auto value = json.value(key, Json());
      if (!value.is_null() && value != "" && value != 0.0 && value != false) throw ConfigError("{} {} is not read here", key, value.dump());
    }
    core_.falls_back = json.value("byte_fallback", false);
    core_.joins_unknown = json.value("fuse_unk", false);
    core_.takes_whole = json.value("ignore_merges", false);
    const auto add = [&](const std::string& token, int32_t id) {
      if (static_cast<size_t>(id) >= core_.tokens.size()) core_.tokens.resize(static_cast<size_t>(id) + 1);
      core_.tokens[static_cast<size_t>(id)] = token;
      core_.ids[token] = id;
    };
    if (type == "Unigram") {
      core_.model = TokenModel::Unigram;
      for (const auto& piece : json.at("vocab")) {
        add(piece.at(0), static_cast<int32_t>(core_.scores.size()));
        core_.scores.push_back(piece.at(1));
      }
      if (const auto unknown = json.value("unk_id", Json()); !unknown.is_null()) core_.unknown = id_of(unknown);
      if (core_.unknown && std::cmp_greater_equal(*core_.unknown, core_.tokens.size())) core_.unknown = -1;
      return;
    }
    for (const auto& [token, number] : json.at("vocab").items()) add(token, id_of(number));
    if (const auto unknown = json.value("unk_token", Json()); !unknown.is_null()) {
      const auto found = core_.ids.find(unknown.get<std::string>());
      core_.unknown = found == core_.ids.end() ? -1 : found->second;
    }
    for (const auto& merge : json.at("merges"))
      core_.merges.push_back(merge.is_array() ? fmt::format("{} {}", merge.at(0).get<std::string>(), merge.at(1).get<std::string>())
                                              : merge.get<std::string>());
  }

  void read_added(const Json& token) {
    const auto flag = [&](const char* name) { return token.value(name, false); };
    const auto id = id_of(token.at("id"));
    if (std::ranges::find(core_.added, id, &AddedToken::id) != core_.added.end()) return;
    core_.added.push_back({.content = token.at("content"),
                           .id = id,
                           .special = flag("special"),
                           .lstrip = flag("lstrip"),
                           .rstrip = flag("rstrip"),
                           .single_word = flag("single_word"),
                           .normalized = flag("normalized")});
  }

  /// Reads the tokens with which texts begin and end.
  void read_ends(const std::string& type, const Json& json) {
    if (type == "ByteLevel") return;
    if (type != "TemplateProcessing") refuse(type);
    auto* ends = &core_.first;
    for (const auto& each : json.at("single")) {
      if (each.contains("Sequence")) {
        ends = &core_.last;
        continue;
      }
      const auto name = each.at("SpecialToken").at("id").get<std::string>();
      for (const auto& id : json.at("special_tokens").at(name).at("ids")) ends->push_back(id_of(id));
    }
  }

  const Json& json_;
  TokenizerCore& core_;
};

Json json_in(const std::string& text) {
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

/// Reads a file of SentencePiece, with the added tokens and the ends of texts that the files beside it name.
std::shared_ptr<const TokenizerCore> core_of_model_file(const fs::path& path) try {
  const auto folder = path.parent_path();
  auto files = files_in(folder);
  const auto config = files.contains(kTokenizerConfig) ? json_in(files[kTokenizerConfig]) : Json::object();
  auto vocabulary = read_sentence_piece(path, config);
  auto description = description_of(vocabulary);
  // Of tokens with one id the first counts.
  auto added = Json::array();
  const auto add = [&](int64_t id, const Json& token) {
    added.push_back({{"id", id}, {"special", true}});
    added.back().update(token);
    added.back()["normalized"] = token.at("content").get<std::string>().find(kPieceSpace) != std::string::npos;
  };
  const auto named = config.value("added_tokens_decoder", Json::object());
  for (const auto& [id, token] : named.items()) add(number_of<int64_t>(id).value_or(-1), token);
  const auto more = files.contains(kAddedTokensFile) ? json_in(files[kAddedTokensFile]) : Json::object();
  for (const auto& [token, id] : more.items()) add(id, {{"content", token}});
  for (const auto& token : description["added_tokens"]) added.push_back(token);
  description["added_tokens"] = added;
  return core_of(vocabulary, description, std::move(files));
} catch (const Json::exception& error) {
  throw IoError("a JSON file beside {} is damaged: {}", path, first_line(error));
}

}  // namespace

std::map<std::string, std::string> files_in(const fs::path& folder, std::span<const std::string_view> names) {
  std::map<std::string, std::string> files;
  for (const auto name : names) {
    if (is_there(folder / name)) files[std::string(name)] = InputFile(folder / name).read_all();
  }
  return files;
}

std::string to_base64(std::string_view bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size(); at += 3) {
    uint32_t bits = 0;
    for (size_t i = 0; i < 3; i++) bits = bits << 8 | (at + i < bytes.size() ? static_cast<uint8_t>(bytes[at + i]) : 0U);
    for (size_t i = 0; i < 4; i++) text += at + i <= bytes.size() ? kDigits64[bits >> (18 - 6 * i) & 63] : '=';
  }
  return text;
}

std::string config_with(Json keys) {
  keys.update({{"tokenizer_class", "PreTrainedTokenizerFast"},
               {"clean_up_tokenization_spaces", false},
               {"model_input_names", {"input_ids", "attention_mask"}}});
  return keys.dump(2) + "\n";
}

std::shared_ptr<const TokenizerCore> core_of(const std::string& where, const Json& description, Rules rules,
                                             std::map<std::string, std::string> files) try {
  if (!description.is_object()) throw IoError("{} is damaged: it is not a JSON object", where);
  auto core = std::make_shared<TokenizerCore>();
  core->rules = rules;
  core->files = std::move(files);
  TokenizerFile(description, *core);
  core->complete();
  return core;
} catch (const ConfigError&) {
  std::rethrow_exception(with_context(where + ": "));
} catch (const Json::exception& error) {
  throw IoError("{} is damaged: {}", where, first_line(error));
}

FoundTemplate chat_template_in(const std::map<std::string, std::string>& files) {
  if (const auto whole = files.find(kChatTemplateFile); whole != files.end()) return {whole->second, kChatTemplateFile};
  const auto config = files.find(kTokenizerConfig);
  const auto json = config == files.end() ? Json() : json_in(config->second);
  auto found = json.is_object() ? json.value("chat_template", Json()) : Json();
  // Some tokenizers have several templates, with names.
  for (const auto& each : found.is_array() ? Json(found) : Json::array()) {
    if (each.is_object() && each.value("name", Json()) == "default") found = each.value("template", Json());
  }
  return found.is_string() ? FoundTemplate{found.get<std::string>(), kTokenizerConfig} : FoundTemplate{};
}

Tokenizer::Tokenizer(const BpeVocabulary& vocabulary) : core_(core_of(vocabulary, description_of(vocabulary), {})) {}

Tokenizer Tokenizer::read(const fs::path& path) {
  const auto file = is_folder(path) ? path / kTokenizerFile : path;
  const auto folder = file.parent_path(), model = is_folder(path) ? folder / kModelFile : file;
  if (model.extension() == ".model" && is_there(model) && (model == file || !is_there(file))) return Tokenizer(core_of_model_file(model));
  if (!is_there(file) && is_there(folder / "vocab.json") && is_there(folder / "merges.txt"))
    throw ConfigError("{} has no {}, but vocab.json and merges.txt: {}", folder, kTokenizerFile, kLetTransformersMakeIt);
  auto files = files_in(folder);
  auto& text = files[kTokenizerFile];
  if (text.empty() || file.filename() != kTokenizerFile) text = InputFile(file).read_all();
  const auto description = json_in(text);
  return Tokenizer(core_of(file.string(), description, Rules::HuggingFace, std::move(files)));
}

std::string Tokenizer::json() const {
  return core_->files.at(kTokenizerFile);
}

void Tokenizer::write(const fs::path& folder) const {
  make_folder(folder);
  auto files = core_->files;
  if (!files.contains(kTokenizerConfig))
    files[kTokenizerConfig] =
        config_with(core_->first.empty() ? Json() : Json{{"bos_token", core_->tokens[static_cast<size_t>(core_->first.front())]}});
  for (const auto& [name, text] : files) write_text(folder / name, text);
}

}  // namespace tessera::data
