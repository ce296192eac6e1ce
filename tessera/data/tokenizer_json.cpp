// Reads and writes tokenizer.json as Hugging Face's library does.
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/data/pattern.h"
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

/// A tokenizer.json that is being read. Its errors name the part of the file.
class TokenizerFile {
 public:
  explicit TokenizerFile(const fs::path& path, const std::string& text) : path_(path) {
    json_ = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json_.is_object()) throw IoError("{} is damaged: it is not a JSON object", path);
  }

  void read_into(TokenizerCore& core) const try {
    refuse_sentence_piece();
    read_form(core);
    core.pre.emplace(read_pre());
    read_model(part("model"), core);
    read_added(part("added_tokens"), core);
    read_ends(core);
    each_of(part("decoder"), "decoders", [&](const std::string& type, const Json& json) {
      if (type != "ByteLevel" && type != "Fuse") refuse_type("decoder", json);
    });
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

  /// Throws ConfigError for a tokenizer of SentencePiece. Called first, because errors about single parts of such a file would not tell the
  /// reason.
  void refuse_sentence_piece() const {
    const auto has_type = [](const Json& json, const char* parts, std::string_view type) {
      const auto is = [&](const Json& each) { return each.is_object() && each.value("type", Json()) == type; };
      if (is(json)) return true;
      if (!json.is_object()) return false;
      const auto all = json.find(parts);
      return all != json.end() && all->is_array() && std::ranges::any_of(*all, is);
    };
    const auto& model = part("model");
    const bool is_it = has_type(part("pre_tokenizer"), "pretokenizers", "Metaspace") ||
                       has_type(part("normalizer"), "normalizers", "Prepend") || has_type(model, "", "Unigram") ||
                       (model.is_object() && model.value("byte_fallback", Json()) == true);
    if (is_it) throw ConfigError("{}: {}", path_, kSentencePiece);
  }

  Pattern pattern_of(const std::string& text) const try { return Pattern(text); } catch (const ConfigError& error) {
    refuse("pre_tokenizer", error.what());
  }

  /// Calls act(type, json) for a part, or, if it is a Sequence, for each part in its list. Does nothing for null.
  static void each_of(const Json& json, const char* list, const auto& act) {
    if (json.is_null()) return;
    const auto type = json.at("type").get<std::string>();
    if (type != "Sequence") return act(type, json);
    for (const auto& each : json.at(list)) each_of(each, list, act);
  }

  void read_form(TokenizerCore& core) const {
    each_of(part("normalizer"), "normalizers", [&](const std::string& type, const Json& json) {
      if ((type != "NFC" && type != "NFD") || core.form) refuse_type("normalizer", json);
      core.form = type == "NFC" ? NormalForm::Composed : NormalForm::Decomposed;
    });
  }

  std::vector<PreTokenizer::Step> read_pre() const {
    std::vector<PreTokenizer::Step> steps;
    bool is_byte_level = false;
    each_of(part("pre_tokenizer"), "pretokenizers", [&](const std::string& type, const Json& json) {
      if (is_byte_level) refuse("pre_tokenizer", "a part after ByteLevel is not read here");
      if (type == "Digits") {
        steps.push_back({.pattern = Pattern(json.value("individual_digits", false) ? kDigitPattern : kDigitsPattern)});
      } else if (type == "Split") {
        steps.push_back(split_of(json));
      } else if (type == "ByteLevel") {
        is_byte_level = true;
        const bool adds_space = json.value("add_prefix_space", true), cuts = json.value("use_regex", true);
        if (adds_space || cuts) steps.push_back({.pattern = Pattern(cuts ? kGpt2Pattern : kNoMatch), .adds_space = adds_space});
      } else {
        refuse_type("pre_tokenizer", json);
      }
    });
    if (!is_byte_level) refuse("pre_tokenizer", "there is no ByteLevel in it, and only byte-level BPE is read here");
    return steps;
  }

  PreTokenizer::Step split_of(const Json& json) const {
    const auto behavior = json.at("behavior").get<std::string>();
    if (json.value("invert", false) || (behavior != "Isolated" && behavior != "Removed"))
      refuse("pre_tokenizer", fmt::format("of Split only the behaviors Isolated and Removed are read here, not {}{}", printable(behavior),
                                          json.value("invert", false) ? " with invert" : ""));
    const auto& pattern = json.at("pattern");
    const auto text =
        pattern.contains("Regex") ? pattern.at("Regex").get<std::string>() : escaped_pattern(pattern.at("String").get<std::string>());
    return {.pattern = pattern_of(text),
            .behavior = behavior == "Isolated" ? PreTokenizer::Behavior::Isolated : PreTokenizer::Behavior::Removed};
  }

  void read_model(const Json& json, TokenizerCore& core) const {
    if (json.is_null()) refuse("model", "it is missing");
    if (json.value("type", "BPE") != "BPE") refuse_type("model", json);
    for (const auto* key : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"}) {
      const auto value = json.value(key, Json());
      if (!value.is_null() && value != "" && value != 0.0) refuse("model", fmt::format("{} {} is not read here", key, value.dump()));
    }
    core.has_unknown = !json.value("unk_token", Json()).is_null();
    if (json.value("byte_fallback", false)) refuse("model", "byte_fallback is set, so this is not byte-level BPE");
    const auto& vocabulary = json.at("vocab");
    for (const auto& [token, number] : vocabulary.items()) {
      const auto id = id_of(number, "model");
      if (static_cast<size_t>(id) >= core.tokens.size()) core.tokens.resize(static_cast<size_t>(id) + 1);
      core.tokens[static_cast<size_t>(id)] = token;
      core.ids.emplace(token, id);
    }
    for (const auto& merge : json.at("merges"))
      core.merges.push_back(merge.is_array() ? fmt::format("{} {}", merge.at(0).get<std::string>(), merge.at(1).get<std::string>())
                                             : merge.get<std::string>());
    core.takes_whole = json.value("ignore_merges", false);
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
  const auto refuse = [&](const char* there, std::string_view why) {
    throw ConfigError("{} has no {}, but {}: {}", folder, kTokenizerFile, there, why);
  };
  if (is_there(folder / "tokenizer.model")) refuse("tokenizer.model", kSentencePiece);
  if (is_there(folder / "vocab.json") && is_there(folder / "merges.txt"))
    refuse("vocab.json and merges.txt", "let transformers make it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)");
}

/// Makes tokenizer.json for a tokenizer that was not read from such a file.
InOrder json_of(const TokenizerCore& core) {
  InOrder json = {
      {"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}, {"added_tokens", InOrder::array()}, {"normalizer", nullptr}};
  for (const auto& token : core.added) json["added_tokens"].push_back(added_of(token));
  if (core.form) json["normalizer"] = {{"type", *core.form == NormalForm::Composed ? "NFC" : "NFD"}};
  const InOrder byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  InOrder steps = InOrder::array();
  for (const auto& step : core.pre->steps()) steps.push_back(step_of(step));
  steps.push_back(byte_level);
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", steps}};
  json["post_processor"] = nullptr;
  if (!core.first.empty()) {
    const auto& token = core.tokens[static_cast<size_t>(core.first.front())];
    const auto piece = [](const char* kind, const std::string& id, int number) {
      return InOrder{{kind, {{"id", id}, {"type_id", number}}}};
    };
    const auto begin = piece("SpecialToken", token, 0), one = piece("Sequence", "A", 0), other = piece("Sequence", "B", 1);
    json["post_processor"] = {{"type", "TemplateProcessing"},
                              {"single", InOrder::array({begin, one})},
                              {"pair", InOrder::array({begin, one, other})},
                              {"special_tokens", {{token, {{"id", token}, {"ids", {core.first.front()}}, {"tokens", {token}}}}}}};
  }
  json["decoder"] = byte_level;
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

Tokenizer Tokenizer::read(const fs::path& path) {
  const auto file = is_folder(path) ? path / kTokenizerFile : path;
  auto core = std::make_shared<TokenizerCore>();
  if (!is_there(file)) refuse_other_files(file.parent_path());
  core->files[kTokenizerFile] = InputFile(file).read_all();
  TokenizerFile(file, core->files[kTokenizerFile]).read_into(*core);
  core->complete(file.string());
  for (const auto name : kBeside) {
    const auto beside = file.parent_path() / name;
    if (is_there(beside)) core->files[std::string(name)] = InputFile(beside).read_all();
  }
  return Tokenizer(std::move(core));
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
