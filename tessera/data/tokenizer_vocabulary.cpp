// Makes the description of a tokenizer, as tokenizer.json has it, from the vocabulary of a GGUF file, and back.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/tokenizer_core.h"

namespace tessera::data {
namespace {

using Json = nlohmann::json;

/// Throws ConfigError for a part that a GGUF file can't hold.
[[noreturn]] void refuse_place(const std::string& part) {
  throw ConfigError("{}, which has no place there", part);
}

const std::string& token_of(const BpeVocabulary& vocabulary, int32_t id) {
  if (id < 0 || static_cast<size_t>(id) >= vocabulary.tokens.size())
    throw ConfigError("a vocabulary of {} tokens has no token {}", vocabulary.tokens.size(), id);
  return vocabulary.tokens[static_cast<size_t>(id)];
}

/// Calls take(left, right) for each two tokens that make this one. No text has spaces when its characters are merged.
void each_split(std::string_view token, const TokenIds& ids, const auto& take) {
  if (token.empty() || invalid_utf8(token) || byte_of_piece(token) || token.find(' ') != std::string_view::npos) return;
  for (auto at = length_of_first(token); at < token.size(); at += length_of_first(token.substr(at))) {
    if (ids.contains(token.substr(0, at)) && ids.contains(token.substr(at))) take(token.substr(0, at), token.substr(at));
  }
}

/// Returns a merge for each two tokens that make a third, in the order of that one's score.
std::vector<std::string> merges_of_scores(const BpeVocabulary& vocabulary) {
  TokenIds ids;
  std::vector<std::pair<double, int32_t>> by_score;
  for (int32_t id = 0; std::cmp_less(id, vocabulary.tokens.size()); id++) {
    const auto& token = vocabulary.tokens[static_cast<size_t>(id)];
    const bool is_special = std::ranges::find(vocabulary.special, id) != vocabulary.special.end();
    if (ids.emplace(token, id).second && !is_special) by_score.emplace_back(-vocabulary.scores[static_cast<size_t>(id)], id);
  }
  std::ranges::sort(by_score);
  std::vector<std::string> merges;
  for (const auto& [score, id] : by_score)
    each_split(vocabulary.tokens[static_cast<size_t>(id)], ids,
               [&](std::string_view left, std::string_view right) { merges.push_back(fmt::format("{} {}", left, right)); });
  return merges;
}

Json sequence_of(const char* list, const std::vector<Json>& parts) {
  return {{"type", "Sequence"}, {list, parts}};
}

Json replace_step(const char* kind, std::string_view pattern, std::string_view by) {
  return {{"type", "Replace"}, {"pattern", {{kind, pattern}}}, {"content", by}};
}

/// Returns the part that adds the tokens with which texts begin and end.
Json template_of(const BpeVocabulary& vocabulary) {
  auto single = Json::array(), tokens = Json::object();
  const auto add = [](Json& to, const char* kind, const std::string& id, int number) {
    to.push_back({{kind, {{"id", id}, {"type_id", number}}}});
  };
  const auto add_token = [&](Json& to, std::optional<int32_t> id, const char* name) {
    if (!id) throw ConfigError("texts begin or end with {}, but the vocabulary does not say which token that is", name);
    const auto& token = token_of(vocabulary, *id);
    add(to, "SpecialToken", token, 0);
    tokens[token] = {{"id", token}, {"ids", {*id}}, {"tokens", {token}}};
  };
  if (vocabulary.add_bos) add_token(single, vocabulary.bos, "bos");
  add(single, "Sequence", "A", 0);
  if (vocabulary.add_eos) add_token(single, vocabulary.eos, "eos");
  auto pair = single;
  add(pair, "Sequence", "B", 1);
  if (vocabulary.add_eos) add_token(pair, vocabulary.eos, "eos");
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
}

/// Adds what is said of gpt2.
void describe_bytes(Json& json, const BpeVocabulary& vocabulary) {
  const auto* known = find_pre_tokenizer(vocabulary.pre);
  if (known == nullptr)
    throw ConfigError("there is no pre-tokenizer '{}' here; those that are: {}", printable(vocabulary.pre), names_of_pre_tokenizers());
  if (known->form) json["normalizer"] = {{"type", *known->form == NormalForm::Composed ? "NFC" : "NFD"}};
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  std::vector<Json> steps;
  for (const auto& pattern : known->patterns)
    steps.push_back({{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}});
  steps.push_back(byte_level);
  json["pre_tokenizer"] = sequence_of("pretokenizers", steps);
  json["decoder"] = byte_level;
  json["model"]["merges"] = vocabulary.merges;
  json["model"]["ignore_merges"] = known->takes_whole;
}

/// Adds what is said of llama and t5.
void describe_pieces(Json& json, const BpeVocabulary& vocabulary) {
  if (vocabulary.model != "llama" && vocabulary.model != "t5")
    throw ConfigError("tokenizers of the kind '{}' are not read here; those that are: gpt2, llama, t5", printable(vocabulary.model));
  const auto& scores = vocabulary.scores;
  if (scores.size() != vocabulary.tokens.size() || !std::ranges::all_of(scores, [](double score) { return std::isfinite(score); }))
    throw ConfigError("a vocabulary of {} tokens has {} scores, or one that is not a number", vocabulary.tokens.size(), scores.size());
  const auto& [adds_space, merges_spaces, charsmap] = vocabulary.spaces;
  std::vector<Json> normalizers, decoders = {replace_step("String", kPieceSpace, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}};
  if (!charsmap.empty()) normalizers.push_back({{"type", "Precompiled"}, {"precompiled_charsmap", to_base64(charsmap)}});
  if (merges_spaces) normalizers.insert(normalizers.end(), {replace_step("Regex", kOuterSpaces, ""), replace_step("Regex", kSpaces, " ")});
  if (adds_space) {
    normalizers.push_back({{"type", "Prepend"}, {"prepend", kPieceSpace}});
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  normalizers.push_back(replace_step("String", " ", kPieceSpace));
  json["normalizer"] = sequence_of("normalizers", normalizers);
  json["decoder"] = sequence_of("decoders", decoders);
  auto& model = json["model"];
  model["byte_fallback"] = std::ranges::any_of(vocabulary.tokens, [](const auto& token) { return byte_of_piece(token).has_value(); });
  if (vocabulary.model == "llama") {
    model["merges"] = merges_of_scores(vocabulary);
    model["fuse_unk"] = true;
    if (vocabulary.unknown) model["unk_token"] = token_of(vocabulary, *vocabulary.unknown);
    return;
  }
  model = {{"type", "Unigram"}, {"unk_id", nullptr}, {"byte_fallback", model["byte_fallback"]}, {"vocab", Json::array()}};
  if (vocabulary.unknown) model["unk_id"] = *vocabulary.unknown;
  for (size_t id = 0; id < scores.size(); id++) model["vocab"].push_back({vocabulary.tokens[id], scores[id]});
}

/// Throws ConfigError if a program that only knows the name of the pre-tokenizer, as in a GGUF file, would encode texts differently.
void expect_like(const TokenizerCore& core, const KnownPreTokenizer& known) {
  const auto& steps = core.normalizer.steps();
  const auto form = steps.empty() ? std::nullopt : steps.front().form;
  if (form != known.form || steps.size() != (form ? 1U : 0U)) {
    const auto* name = steps.empty() ? "no normal form" : form == NormalForm::Composed ? "the normal form NFC" : "other steps";
    refuse_place(fmt::format("with its pre-tokenizer {}, the normalizer has {}", known.name, name));
  }
  if (core.takes_whole == known.takes_whole) return;
  // With and without ignore_merges, a tokenizer differs only for words that are tokens but can't be made by merges.
  std::vector<int32_t> parts;
  for (const auto& [token, id] : core.ids) {
    if (std::ranges::find(core.added, id, &AddedToken::id) != core.added.end()) continue;
    parts.clear();
    core.pairs->encode(core.bytes[static_cast<size_t>(id)], parts);
    if (parts.size() != 1)
      refuse_place(fmt::format("with its pre-tokenizer {}, ignore_merges is {}, and '{}' is a token by that alone", known.name, core.takes_whole,
                               printable(token)));
  }
}

/// Adds what a GGUF file says of SentencePiece's kinds. Throws ConfigError for all else.
void add_pieces(BpeVocabulary& vocabulary, const TokenizerCore& core) {
  vocabulary.model = core.model == TokenModel::Unigram ? "t5" : "llama";
  vocabulary.unknown = core.unknown;
  vocabulary.spaces.added = false;
  const std::string spaces = escaped_pattern(" "), no_pattern;
  for (const auto* each : {&core.normalizer, &core.pre}) {
    for (const auto& step : each->steps()) {
      const auto& pattern = step.pattern ? step.pattern->text() : no_pattern;
      const bool merges_spaces = pattern == kSpaces || pattern == kOuterSpaces || pattern == kWhite || pattern == kWhiteEnd;
      const bool is_plain = pattern.empty() || pattern == spaces || pattern.find(kPieceSpace) != std::string::npos;
      if (step.form || (!merges_spaces && !is_plain)) refuse_place("its normalizer or pre-tokenizer has steps that SentencePiece has not");
      if (step.prefix != PreTokenizer::Prefix::Never) vocabulary.spaces.added = true;
      if (step.charsmap) vocabulary.spaces.charsmap = step.charsmap->table();
      vocabulary.spaces.merged = vocabulary.spaces.merged || merges_spaces;
    }
  }
  // llama.cpp looks for such tokens before it replaces spaces.
  for (const auto& token : core.added) {
    auto& text = vocabulary.tokens[static_cast<size_t>(token.id)];
    if (!token.special) text = with_spaces(text);
  }
  vocabulary.scores = core.scores;
  vocabulary.scores.resize(core.tokens.size());
  if (core.model == TokenModel::Unigram) return;
  // The order of merges is that of scores if all two tokens that make a third are merged.
  const auto learned = core.learned_merges();
  std::unordered_set<int32_t> added;
  for (const auto& token : core.added) added.insert(token.id);
  auto splits = std::ranges::count_if(learned, [&](const BytePairs::Merge& merge) { return !added.contains(merge.merged); });
  for (const auto& [token, id] : core.ids) {
    if (!added.contains(id)) each_split(token, core.ids, [&](auto, auto) { splits--; });
  }
  if (core.takes_whole || splits != 0) refuse_place("its merges are not those of all two tokens that make a third");
  for (auto merge = learned.rbegin(); merge != learned.rend(); merge++)
    vocabulary.scores[static_cast<size_t>(merge->merged)] = -static_cast<double>(merge->rank);
}

}  // namespace

bool adds_bos(std::string_view pre) {
  const auto* known = find_pre_tokenizer(pre);
  return known != nullptr && known->takes_whole;
}

Json description_of(const BpeVocabulary& vocabulary) {
  auto json = Json::parse(R"({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type": "BPE", "dropout": null, "unk_token": null,
    "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
    "vocab": {}, "merges": []}})");
  const bool by_bytes = vocabulary.model == "gpt2";
  by_bytes ? describe_bytes(json, vocabulary) : describe_pieces(json, vocabulary);
  if (auto& all = json["model"]["vocab"]; all.is_object()) {
    for (size_t id = 0; id < vocabulary.tokens.size(); id++)
      if (!vocabulary.tokens[id].empty()) all.emplace(vocabulary.tokens[id], id);
  }
  const auto has = [](const std::vector<int32_t>& ids, int32_t id) { return std::ranges::find(ids, id) != ids.end(); };
  for (const auto id : vocabulary.added) {
    const auto& token = token_of(vocabulary, id);
    json["added_tokens"].push_back({{"id", id},
                                    {"content", token},
                                    {"single_word", false},
                                    {"lstrip", false},
                                    {"rstrip", has(vocabulary.rstrip, id)},
                                    {"normalized", !by_bytes && token.find(kPieceSpace) != std::string::npos},
                                    {"special", has(vocabulary.special, id)}});
  }
  if (vocabulary.add_bos || vocabulary.add_eos) json["post_processor"] = template_of(vocabulary);
  return json;
}

std::shared_ptr<const TokenizerCore> core_of(const BpeVocabulary& vocabulary, const Json& description,
                                             std::map<std::string, std::string> files) {
  if (!vocabulary.chat_template.empty()) files.try_emplace(kChatTemplateFile, vocabulary.chat_template);
  Json config;
  for (const auto& [name, id] : {std::pair("bos_token", vocabulary.bos),
                                 {"eos_token", vocabulary.eos},
                                 {"pad_token", vocabulary.pad},
                                 {"unk_token", vocabulary.unknown}}) {
    if (id) config[name] = token_of(vocabulary, *id);
  }
  files.try_emplace(kTokenizerConfig, config_with(std::move(config)));
  files[kTokenizerFile] = description.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace) + "\n";
  const auto rules = vocabulary.model == "gpt2" ? Rules::HuggingFace : Rules::SentencePiece;
  return core_of("the vocabulary", description, rules, std::move(files));
}

BpeVocabulary Tokenizer::vocabulary() const {
  const bool by_bytes = core_->model == TokenModel::BytePairs;
  BpeVocabulary result{.tokens = core_->tokens,
                       .merges = {},
                       .added = {},
                       .special = {},
                       .pre = {},
                       .chat_template = chat_template_in(core_->files).text};
  if (core_->first.size() > 1 || core_->last.size() > 1) refuse_place("texts begin or end with several tokens");
  for (const auto& token : core_->added) {
    const auto* flag = token.lstrip                                                           ? "lstrip"
                       : token.rstrip && by_bytes                                             ? "rstrip"
                       : token.single_word                                                    ? "single_word"
                       : token.normalized && by_bytes && !core_->normalizer.steps().empty() ? "normalized"
                                                                                              : nullptr;
    if (flag != nullptr) refuse_place(fmt::format("the added token '{}' has {}", printable(token.content), flag));
    result.added.push_back(token.id);
    if (token.special) result.special.push_back(token.id);
    if (token.rstrip) result.rstrip.push_back(token.id);
  }
  if (by_bytes) {
    const auto* known = find_pre_tokenizer(core_->pre);
    if (known == nullptr)
      throw ConfigError("its pre-tokenizer is not one of those that a GGUF file can name: {}", names_of_pre_tokenizers());
    expect_like(*core_, *known);
    result.merges = core_->merges;
    result.pre = known->name;
  } else {
    add_pieces(result, *core_);
  }
  const auto end_of = [](const std::vector<int32_t>& ends) { return ends.empty() ? std::nullopt : std::optional(ends.front()); };
  result.bos = end_of(core_->first);
  result.eos = end_of(core_->last);
  result.add_bos = result.bos.has_value();
  result.add_eos = result.eos.has_value();
  return result;
}

}  // namespace tessera::data
