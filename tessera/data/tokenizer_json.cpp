// Reads and writes tokenizer.json as Hugging Face's library does.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

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
using Json = nlohmann::json;             // finds a key among 150,000 fast
using InOrder = nlohmann::ordered_json;  // keeps keys in the order of the file

constexpr auto kTokenizerFile = "tokenizer.json", kTokenizerConfig = "tokenizer_config.json";
// Other files of a tokenizer's folder, which write() copies unchanged.
constexpr std::string_view kBeside[] = {kTokenizerConfig, "special_tokens_map.json", kChatTemplateFile, "generation_config.json"};
constexpr auto kNoMatch = "(?!)";
constexpr auto kSpaces = " {2,}", kOuterSpaces = "\\A +|[ \u2581]+\\z";  // as normalizers name them
constexpr std::pair<std::string_view, NormalForm> kForms[] = {{"NFC", NormalForm::Composed},
                                                              {"NFD", NormalForm::Decomposed},
                                                              {"NFKC", NormalForm::CompatibleComposed},
                                                              {"NFKD", NormalForm::CompatibleDecomposed}};
constexpr std::pair<std::string_view, PreTokenizer::Behavior> kBehaviors[] = {{"Isolated", PreTokenizer::Behavior::Isolated},
                                                                              {"Removed", PreTokenizer::Behavior::Removed},
                                                                              {"MergedWithNext", PreTokenizer::Behavior::BeginsPiece},
                                                                              {"MergedWithPrevious", PreTokenizer::Behavior::EndsPiece}};
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

std::string to_base64(std::string_view bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size(); at += 3) {
    uint32_t bits = 0;
    for (size_t i = 0; i < 3; i++) bits = bits << 8 | (at + i < bytes.size() ? static_cast<uint8_t>(bytes[at + i]) : 0U);
    for (size_t i = 0; i < 4; i++) text += at + i <= bytes.size() ? kDigits64[bits >> (18 - 6 * i) & 63] : '=';
  }
  return text;
}


/// A tokenizer.json that is being read. Its errors name the part of the file.
class TokenizerFile {
 public:
  TokenizerFile(const fs::path& path, const std::string& text, Charsmap::Match match) : path_(path), match_(match) {
    json_ = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json_.is_object()) throw IoError("{} is damaged: it is not a JSON object", path);
  }

  void read_into(TokenizerCore& core) const try {
    read_model(part("model"), core);
    read_added(part("added_tokens"), core);
    read_steps(core);
  } catch (const Json::exception& error) {
    throw IoError("{} is damaged: {}", path_, first_line(error));
  }

  /// Reads all but the vocabulary.
  void read_steps(TokenizerCore& core) const try {
    core.spaces.added = false;
    read_normalizer(core);
    core.pre.emplace(read_pre(core));
    read_ends(core);
    read_decoder(core);
  } catch (const Json::exception& error) {
    throw IoError("{} is damaged: {}", path_, first_line(error));
  }

 private:
  [[noreturn]] void refuse(std::string_view part, const std::string& why) const { throw ConfigError("{}: {}: {}", path_, part, why); }
  [[noreturn]] void refuse_type(std::string_view part, const Json& json) const {
    refuse(part, fmt::format("'{}' is not read here", printable(json.value("type", "?"))));
  }

  int32_t id_of(const Json& number, std::string_view part) const {
    const auto id = number.get<int64_t>();
    if (id < 0 || id >= kMostTokens) refuse(part, fmt::format("{} can't be the id of a token", id));
    return static_cast<int32_t>(id);
  }

  const Json& part(const char* key) const {
    static const Json nothing;
    const auto found = json_.find(key);
    return found == json_.end() ? nothing : *found;
  }

  /// Whether the pre-tokenizer makes bytes.
  bool is_byte_level() const {
    bool found = false;
    each_of(part("pre_tokenizer"), "pretokenizers", [&](const std::string& type, const Json&) { found = found || type == "ByteLevel"; });
    return found;
  }

  Pattern pattern_of(const std::string& text, std::string_view part) const try { return Pattern(text); } catch (const ConfigError& error) {
    refuse(part, error.what());
  }

  /// Returns the step of a Replace.
  TextStep replace_of(const Json& json, std::string_view part) const {
    const auto& pattern = json.at("pattern");
    const auto literal = pattern.contains("String") ? pattern.at("String").get<std::string>() : "";
    const auto text = literal.empty() ? pattern.value("Regex", "") : escaped_pattern(literal);
    return replacing(std::make_shared<Pattern>(pattern_of(text, part)), literal, json.at("content").get<std::string>());
  }

  /// Calls act(type, json) for a part, or, if it is a Sequence, for each part in its list. Does nothing for null.
  static void each_of(const Json& json, const char* list, const auto& act) {
    if (json.is_null()) return;
    const auto type = json.at("type").get<std::string>();
    if (type != "Sequence") return act(type, json);
    for (const auto& each : json.at(list)) each_of(each, list, act);
  }

  void read_normalizer(TokenizerCore& core) const {
    each_of(part("normalizer"), "normalizers", [&](const std::string& type, const Json& json) {
      if (const auto* form = std::ranges::find(kForms, type, &std::pair<std::string_view, NormalForm>::first); form != std::end(kForms)) {
        core.form = core.normalizer.empty() ? std::optional(form->second) : std::nullopt;
        core.normalizer.push_back(normalizing(form->second));
        core.unnamed = "the normalizer " + type;
        return;
      }
      core.form.reset();
      bool has_name = false;  // in GGUF files
      if (type == "Prepend") {
        const auto prefix = json.at("prepend").get<std::string>();
        has_name = core.spaces.added = prefix == kPieceSpace;
        core.normalizer.push_back(prepending(prefix));
      } else if (type == "Replace") {
        const auto& pattern = json.at("pattern");
        const bool spaces = pattern.value("Regex", "") == kSpaces || pattern.value("Regex", "") == kOuterSpaces;
        core.spaces.merged = core.spaces.merged || spaces;
        has_name = spaces || (pattern.value("String", "") == " " && json.at("content") == kPieceSpace);
        core.normalizer.push_back(replace_of(json, "normalizer"));
      } else if (type == "Strip") {
        has_name = true;
        core.normalizer.push_back(stripping(json.value("strip_left", true), json.value("strip_right", true)));
      } else if (type == "StripAccents") {
        core.normalizer.push_back(changing_characters([](std::u32string& text) { std::erase_if(text, is_mark); }));
      } else if (type == "Lowercase") {
        core.normalizer.push_back(changing_characters([](std::u32string& text) { text = in_lower_case(text); }));
      } else if (type == "Precompiled") {
        const auto table = json.at("precompiled_charsmap");
        if (table.is_null() || table == "") return;
        has_name = true;
        core.spaces.charsmap = of_base64(table.get<std::string>());
        core.normalizer.push_back(charsmap_of(core.spaces.charsmap));
      } else {
        refuse_type("normalizer", json);
      }
      if (!has_name) core.unnamed = "the normalizer " + type;
    });
  }

  TextStep charsmap_of(const std::string& table) const try {
    return [map = std::make_shared<Charsmap>(table, match_)](std::string& text) { (*map)(text); };
  } catch (const ConfigError& error) {
    refuse("normalizer", error.what());
  }

  std::vector<PreTokenizer::Step> read_pre(TokenizerCore& core) const {
    std::vector<PreTokenizer::Step> steps;
    bool is_done = false;
    each_of(part("pre_tokenizer"), "pretokenizers", [&](const std::string& type, const Json& json) {
      if (is_done) refuse("pre_tokenizer", "a part after ByteLevel is not read here");
      if (type == "Metaspace") {
        steps.push_back(metaspace_of(json));
        core.spaces.added = core.spaces.added || steps.back().prefix != PreTokenizer::Prefix::Never;
        return;
      }
      if (type == "WhitespaceSplit") {
        core.spaces.merged = true;
        steps.push_back({.pattern = Pattern(R"(\s+)"), .behavior = PreTokenizer::Behavior::Removed});
        return;
      }
      if (type == "Digits") {
        steps.push_back({.pattern = Pattern(json.value("individual_digits", false) ? kDigitPattern : kDigitsPattern)});
      } else if (type == "Split") {
        steps.push_back(split_of(json));
        if (steps.back().literal == " ") return;  // no space is left in a text of SentencePiece
      } else if (type == "ByteLevel") {
        is_done = true;
        const bool adds_space = json.value("add_prefix_space", true), cuts = json.value("use_regex", true);
        if (adds_space || cuts)
          steps.push_back({.pattern = Pattern(cuts ? kGpt2Pattern : kNoMatch),
                           .prefix = adds_space ? PreTokenizer::Prefix::Always : PreTokenizer::Prefix::Never});
      } else {
        refuse_type("pre_tokenizer", json);
      }
      core.unnamed = "the pre-tokenizer " + type;
    });
    return steps;
  }

  PreTokenizer::Step metaspace_of(const Json& json) const {
    using Prefix = PreTokenizer::Prefix;
    const auto scheme = json.value("prepend_scheme", json.value("add_prefix_space", true) ? "always" : "never");
    const auto space = json.value("replacement", std::string(kPieceSpace));
    const bool cuts = json.value("split", true);
    return {.pattern = Pattern(cuts ? escaped_pattern(space) : kNoMatch),
            .literal = cuts ? space : "",
            .behavior = PreTokenizer::Behavior::BeginsPiece,
            .prefix = scheme == "always"  ? Prefix::Always
                      : scheme == "first" ? Prefix::First
                                          : Prefix::Never,
            .space = space};
  }

  void read_decoder(TokenizerCore& core) const {
    const auto& decoder = part("decoder");
    if (core.model != TokenModel::BytePairs && decoder.is_null()) {
      core.decoder.push_back([](std::vector<std::string>& tokens) {
        for (size_t i = 1; i < tokens.size(); i++) tokens[i].insert(0, 1, ' ');
      });
    }
    each_of(decoder, "decoders", [&](const std::string& type, const Json& json) {
      if (type == "Fuse") {
        core.decoder.push_back([](std::vector<std::string>& tokens) {
          std::string text;
          for (const auto& token : tokens) text += token;
          tokens = {text};
        });
      } else if ((type == "ByteLevel") != (core.model == TokenModel::BytePairs)) {
        refuse_type("decoder", json);
      } else if (type == "Replace") {
        const auto step = replace_of(json, "decoder");
        core.decoder.push_back([step](std::vector<std::string>& tokens) { std::ranges::for_each(tokens, step); });
      } else if (type == "ByteFallback") {
        core.decoder.push_back(join_bytes);
      } else if (type == "Strip") {
        core.decoder.push_back([content = json.at("content").get<std::string>(), start = json.value("start", 0),
                                stop = json.value("stop", 0)](std::vector<std::string>& tokens) {
          for (auto& token : tokens) {
            for (int i = 0; !content.empty() && i < start && token.starts_with(content); i++) token.erase(0, content.size());
            for (int i = 0; !content.empty() && i < stop && token.ends_with(content); i++) token.erase(token.size() - content.size());
          }
        });
      } else if (type == "Metaspace") {
        const auto step = metaspace_of(json);
        const bool removes = step.prefix != PreTokenizer::Prefix::Never;
        core.decoder.push_back([space = step.space, removes](std::vector<std::string>& tokens) {
          for (size_t i = 0; i < tokens.size(); i++) replacing(nullptr, space, i == 0 && removes ? "" : " ")(tokens[i]);
        });
      } else if (type != "ByteLevel") {
        refuse_type("decoder", json);
      }
    });
  }

  PreTokenizer::Step split_of(const Json& json) const {
    using Behavior = PreTokenizer::Behavior;
    const auto name = json.at("behavior").get<std::string>();
    const auto* behavior = std::ranges::find(kBehaviors, name, &std::pair<std::string_view, Behavior>::first);
    if (json.value("invert", false) || behavior == std::end(kBehaviors))
      refuse("pre_tokenizer", fmt::format("Split with the behavior {}{} is not read here", printable(name),
                                          json.value("invert", false) ? " and invert" : ""));
    const auto& pattern = json.at("pattern");
    const auto literal = pattern.contains("Regex") ? "" : pattern.at("String").get<std::string>();
    const auto text = pattern.contains("Regex") ? pattern.at("Regex").get<std::string>() : escaped_pattern(literal);
    return {.pattern = pattern_of(text, "pre_tokenizer"), .literal = literal, .behavior = behavior->second};
  }

  void read_model(const Json& json, TokenizerCore& core) const {
    if (json.is_null()) refuse("model", "it is missing");
    const auto type = json.value("type", "BPE");
    if (type != "BPE" && type != "Unigram") refuse_type("model", json);
    for (const auto* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
      const auto value = json.value(key, Json());
      if (!value.is_null() && value != "" && value != 0.0) refuse("model", fmt::format("{} {} is not read here", key, value.dump()));
    }
    const auto add = [&](const std::string& token, int32_t id) {
      if (static_cast<size_t>(id) >= core.tokens.size()) core.tokens.resize(static_cast<size_t>(id) + 1);
      core.tokens[static_cast<size_t>(id)] = token;
      core.ids[token] = id;
    };
    const auto& vocabulary = json.at("vocab");
    const bool bytes = is_byte_level(), falls_back = json.value("byte_fallback", false);
    if (type == "Unigram" || vocabulary.is_array()) {
      core.model = TokenModel::Unigram;
      for (const auto& piece : vocabulary) {
        add(piece.at(0).get<std::string>(), static_cast<int32_t>(core.scores.size()));
        core.scores.push_back(piece.at(1).get<double>());
      }
      if (const auto unknown = json.value("unk_id", Json()); !unknown.is_null()) core.unknown = id_of(unknown, "model");
      if (core.unknown && static_cast<size_t>(*core.unknown) >= core.tokens.size()) core.unknown = -1;
    } else {
      core.model = bytes ? TokenModel::BytePairs : TokenModel::CharacterPairs;
      for (const auto& [token, number] : vocabulary.items()) add(token, id_of(number, "model"));
      const auto unknown = json.value("unk_token", Json());
      if (!unknown.is_null()) core.unknown = core.ids.contains(unknown.get<std::string>()) ? core.ids.at(unknown.get<std::string>()) : -1;
      core.joins_unknown = json.value("fuse_unk", false);
      core.takes_whole = json.value("ignore_merges", false);
    }
    if (bytes && (core.model != TokenModel::BytePairs || falls_back))
      refuse("model", fmt::format("{} beside the pre-tokenizer ByteLevel is not read here", falls_back ? "byte_fallback" : type));
    if (falls_back) core.set_byte_pieces();
    if (core.model == TokenModel::Unigram) return;
    for (const auto& merge : json.at("merges"))
      core.merges.push_back(merge.is_array() ? fmt::format("{} {}", merge.at(0).get<std::string>(), merge.at(1).get<std::string>())
                                             : merge.get<std::string>());
  }

  void read_added(const Json& json, TokenizerCore& core) const {
    if (json.is_null()) return;
    for (const auto& token : json) {
      core.added.push_back({.content = token.at("content").get<std::string>(),
                            .id = id_of(token.at("id"), "added_tokens"),
                            .special = token.value("special", false),
                            .lstrip = token.value("lstrip", false),
                            .rstrip = token.value("rstrip", false),
                            .single_word = token.value("single_word", false),
                            .normalized = token.value("normalized", false)});
    }
  }

  /// Reads the tokens with which texts begin and end.
  void read_ends(TokenizerCore& core) const {
    each_of(part("post_processor"), "processors", [&](const std::string& type, const Json& json) {
      if (type == "ByteLevel") return;
      if (type != "TemplateProcessing") refuse_type("post_processor", json);
      auto* ends = &core.first;
      for (const auto& each : json.at("single")) {
        if (each.contains("Sequence")) {
          ends = &core.last;
          continue;
        }
        const auto name = each.at("SpecialToken").at("id").get<std::string>();
        for (const auto& id : json.at("special_tokens").at(name).at("ids")) ends->push_back(id_of(id, "post_processor"));
      }
    });
  }

  static constexpr int64_t kMostTokens = 1 << 24;
  const fs::path path_;
  const Charsmap::Match match_;
  Json json_;
};

InOrder step_of(const PreTokenizer::Step& step) {
  return {{"type", "Split"},
          {"pattern", {{"Regex", step.pattern.text()}}},
          {"behavior", step.behavior == PreTokenizer::Behavior::Isolated ? "Isolated" : "Removed"},
          {"invert", false}};
}

InOrder added_of(const AddedToken& token) {
  return {{"id", token.id},         {"content", token.content},       {"single_word", token.single_word}, {"lstrip", token.lstrip},
          {"rstrip", token.rstrip}, {"normalized", token.normalized}, {"special", token.special}};
}

/// Throws ConfigError if the folder has the files of another kind of tokenizer in place of tokenizer.json.
void refuse_other_files(const fs::path& folder) {
  if (is_there(folder / "vocab.json") && is_there(folder / "merges.txt"))
    throw ConfigError(
        "{} has no {}, but vocab.json and merges.txt: let transformers make it: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        folder, kTokenizerFile);
}

/// Adds what is SentencePiece's to tokenizer.json.
void add_pieces(InOrder& json, const TokenizerCore& core) {
  json.update(InOrder::parse(core.steps));
  auto& model = json["model"];
  model["byte_fallback"] = !core.of_bytes.empty();
  if (core.model == TokenModel::Unigram) {
    model = {{"type", "Unigram"}, {"unk_id", *core.unknown}, {"vocab", InOrder::array()}, {"byte_fallback", !core.of_bytes.empty()}};
    for (size_t id = 0; id < core.tokens.size(); id++) model["vocab"].push_back(InOrder::array({core.tokens[id], core.scores[id]}));
    return;
  }
  model["fuse_unk"] = true;
  if (core.unknown) model["unk_token"] = core.tokens[static_cast<size_t>(*core.unknown)];
  for (const auto& merge : core.merges_of_scores())
    model["merges"].push_back({core.tokens[static_cast<size_t>(merge.left)], core.tokens[static_cast<size_t>(merge.right)]});
}

/// Makes tokenizer.json for a tokenizer that was not read from such a file.
InOrder json_of(const TokenizerCore& core) {
  InOrder json = {{"version", "1.0"},     {"truncation", nullptr},    {"padding", nullptr}, {"added_tokens", InOrder::array()},
                  {"normalizer", nullptr}, {"pre_tokenizer", nullptr}};
  for (const auto& token : core.added) json["added_tokens"].push_back(added_of(token));
  const auto id_name = [&](int32_t id) { return core.tokens[static_cast<size_t>(id)]; };
  json["post_processor"] = nullptr;
  if (!core.first.empty() || !core.last.empty()) {
    auto single = InOrder::array(), pair = InOrder::array(), tokens = InOrder::object();
    const auto add = [](InOrder& to, const char* kind, const std::string& id, int number) {
      to.push_back({{kind, {{"id", id}, {"type_id", number}}}});
    };
    const auto add_all = [&](InOrder& to, const std::vector<int32_t>& ids, int number) {
      for (const auto id : ids) {
        add(to, "SpecialToken", id_name(id), number);
        tokens[id_name(id)] = {{"id", id_name(id)}, {"ids", {id}}, {"tokens", {id_name(id)}}};
      }
    };
    for (auto* to : {&single, &pair}) {
      add_all(*to, core.first, 0);
      add(*to, "Sequence", "A", 0);
      add_all(*to, core.last, 0);
    }
    add(pair, "Sequence", "B", 1);
    add_all(pair, core.last, 1);
    json["post_processor"] = {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
  }
  json["decoder"] = nullptr;
  json["model"] = {{"type", "BPE"},
                   {"dropout", nullptr},
                   {"unk_token", nullptr},
                   {"continuing_subword_prefix", nullptr},
                   {"end_of_word_suffix", nullptr},
                   {"fuse_unk", false},
                   {"byte_fallback", false},
                   {"ignore_merges", core.takes_whole},
                   {"vocab", InOrder::object()},
                   {"merges", core.merges}};
  if (core.model == TokenModel::BytePairs) {
    if (core.form) json["normalizer"] = {{"type", *core.form == NormalForm::Composed ? "NFC" : "NFD"}};
    const InOrder byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
    InOrder steps = InOrder::array();
    for (const auto& step : core.pre->steps()) steps.push_back(step_of(step));
    steps.push_back(byte_level);
    json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
    json["decoder"] = byte_level;
  } else {
    add_pieces(json, core);
    if (core.model == TokenModel::Unigram) return json;
  }
  // operator[] would search all keys before it adds a new one.
  auto& vocabulary = json["model"]["vocab"].get_ref<InOrder::object_t&>();
  vocabulary.reserve(core.tokens.size());
  for (size_t id = 0; id < core.tokens.size(); id++) {
    const auto found = core.ids.find(core.tokens[id]);
    if (found != core.ids.end() && found->second == static_cast<int32_t>(id))
      vocabulary.InOrder::object_t::Container::emplace_back(core.tokens[id], id);
  }
  return json;
}

}  // namespace

std::string TokenizerCore::chat_template() const {
  if (const auto whole = files.find(kChatTemplateFile); whole != files.end()) return whole->second;
  const auto config = files.find(kTokenizerConfig);
  if (config == files.end()) return "";
  auto json = Json::parse(config->second, nullptr, /*allow_exceptions=*/false);
  auto found = json.is_object() ? json.value("chat_template", Json()) : Json();
  // Some tokenizers have several templates, with names.
  if (found.is_array()) {
    const auto standard =
        std::ranges::find_if(found, [](const Json& each) { return each.is_object() && each.value("name", Json()) == "default"; });
    found = standard == found.end() ? Json() : standard->value("template", Json());
  }
  return found.is_string() ? found.get<std::string>() : "";
}

void TokenizerCore::read_beside(const fs::path& folder) {
  for (const auto name : kBeside) {
    if (is_there(folder / name)) files[std::string(name)] = InputFile(folder / name).read_all();
  }
}

void TokenizerCore::take_pieces(const BpeVocabulary& vocabulary) {
  if (vocabulary.model != "llama" && vocabulary.model != "t5")
    throw ConfigError("tokenizers of the kind '{}' are not read here; those that are: gpt2, llama, t5", printable(vocabulary.model));
  model = vocabulary.model == "t5" ? TokenModel::Unigram : TokenModel::CharacterPairs;
  if (vocabulary.scores.size() != tokens.size())
    throw ConfigError("a vocabulary of {} tokens has {} scores", tokens.size(), vocabulary.scores.size());
  if (!std::ranges::all_of(vocabulary.scores, [](double score) { return std::isfinite(score); }))
    throw ConfigError("a score of the vocabulary is not a number");
  scores = vocabulary.scores;
  unknown = vocabulary.unknown;
  joins_unknown = true;
  set_byte_pieces();
  special.insert(vocabulary.special.begin(), vocabulary.special.end());
  for (auto& token : added) token.normalized = token.content.find(kPieceSpace) != std::string::npos;
  const auto replace = [](const char* kind, const std::string& pattern, const std::string& by) {
    return InOrder{{"type", "Replace"}, {"pattern", {{kind, pattern}}}, {"content", by}};
  };
  const std::string space(kPieceSpace);
  auto normalizers = InOrder::array();
  auto decoders = InOrder::array({replace("String", space, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}});
  const auto& [adds, merges_spaces, charsmap] = vocabulary.spaces;
  if (!charsmap.empty()) normalizers.push_back({{"type", "Precompiled"}, {"precompiled_charsmap", to_base64(charsmap)}});
  if (merges_spaces) {
    normalizers.push_back(replace("Regex", kOuterSpaces, ""));
    normalizers.push_back(replace("Regex", kSpaces, " "));
  }
  if (adds) {
    normalizers.push_back({{"type", "Prepend"}, {"prepend", space}});
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  normalizers.push_back(replace("String", " ", space));
  const InOrder all = {{"normalizer", {{"type", "Sequence"}, {"normalizers", normalizers}}},
                       {"pre_tokenizer", nullptr},
                       {"decoder", {{"type", "Sequence"}, {"decoders", decoders}}}};
  steps = all.dump();
  TokenizerFile("the vocabulary", steps, Charsmap::Match::Longest).read_steps(*this);
}

Tokenizer Tokenizer::read(const fs::path& path) {
  const auto file = is_folder(path) ? path / kTokenizerFile : path;
  auto core = std::make_shared<TokenizerCore>();
  if (!is_there(file)) {
    const auto model = file.parent_path() / kModelFile;
    if (is_folder(path) && is_there(model)) return read_model_file(model);
    refuse_other_files(file.parent_path());
  } else if (file.extension() == ".model") {
    return read_model_file(file);
  }
  core->files[kTokenizerFile] = InputFile(file).read_all();
  TokenizerFile(file, core->files[kTokenizerFile], Charsmap::Match::Graphemes).read_into(*core);
  core->complete(file.string());
  core->read_beside(file.parent_path());
  return Tokenizer(std::move(core));
}

/// Reads a file of SentencePiece, with the added tokens and the ends of texts that the files beside it name.
Tokenizer Tokenizer::read_model_file(const fs::path& path) {
  TokenizerCore beside;
  beside.read_beside(path.parent_path());
  const auto config = beside.files.find(kTokenizerConfig);
  auto json = config == beside.files.end() ? Json::object() : Json::parse(config->second, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object", path.parent_path() / kTokenizerConfig);
  const auto named = path.parent_path() / "added_tokens.json";
  const auto more = is_there(named) ? Json::parse(InputFile(named).read_all(), nullptr, /*allow_exceptions=*/false) : Json();
  try {
    auto core = core_of(read_sentence_piece(path, json, more));
    core->files.merge(beside.files);
    return Tokenizer(std::move(core));
  } catch (const Json::exception& error) {
    throw IoError("{} is damaged: {}", path.parent_path() / kTokenizerConfig, first_line(error));
  }
}

std::string Tokenizer::json() const {
  const auto read = core_->files.find(kTokenizerFile);
  if (read != core_->files.end()) return read->second;
  return json_of(*core_).dump(-1, ' ', /*ensure_ascii=*/false, InOrder::error_handler_t::replace) + "\n";
}

void Tokenizer::write(const fs::path& folder) const {
  make_folder(folder);
  auto files = core_->files;
  files.try_emplace(kTokenizerFile, json());
  if (!files.contains(kTokenizerConfig)) {
    InOrder config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                      {"clean_up_tokenization_spaces", false},
                      {"model_input_names", {"input_ids", "attention_mask"}}};
    if (!core_->first.empty()) config["bos_token"] = core_->tokens[static_cast<size_t>(core_->first.front())];
    for (const auto& [name, token] : core_->named) config[name] = token;
    files[kTokenizerConfig] = config.dump(2) + "\n";
  }
  for (const auto& [name, text] : files) write_text(folder / name, text);
}

}  // namespace tessera::data
