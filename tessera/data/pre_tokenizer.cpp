#include "tessera/data/pre_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::data {

const char* const kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const char* const kDigitPattern = R"(\p{N})";
const char* const kDigitsPattern = R"(\p{N}+)";

namespace {

constexpr auto kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr auto kQwen2 = R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr auto kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

const auto& all_known() {
  static const KnownPreTokenizer all[] = {{.name = "gpt2", .other_name = "gpt-2", .patterns = {kGpt2Pattern}},
                                          {.name = "llama3", .other_name = "llama-bpe", .patterns = {kLlama3}, .takes_whole = true},
                                          {.name = "qwen2", .patterns = {kQwen2}, .form = NormalForm::Composed},
                                          {.name = "smollm", .patterns = {kDigitPattern, kGpt2Pattern}},
                                          {.name = "tekken", .patterns = {kTekken}, .takes_whole = true}};
  return all;
}

bool is_ascii(std::string_view text) {
  return std::ranges::none_of(text, [](char byte) { return static_cast<uint8_t>(byte) >= 0x80; });
}

}  // namespace

void PreTokenizer::cut(size_t step, std::string_view text, Place place, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const {
  if (text.empty()) return;
  if (step == steps_.size()) return take(text);
  const auto& each = steps_[step];
  std::string changed;
  if (each.form && !is_ascii(text)) text = changed = to_utf8(normalized_for_tokens(characters_of(text), *each.form));
  if (each.charsmap) text = changed = (*each.charsmap)(text);
  const bool may_add = each.prefix != Prefix::Never && (each.prefix != Prefix::IfMissingFirst || place == Place::Begin);
  if (may_add && (each.prefix == Prefix::Always || !text.starts_with(each.by))) text = changed = fmt::format("{}{}", each.by, text);
  if (!each.pattern) return cut(step + 1, text, place, scratch, take);
  size_t done = 0;
  std::string replaced;
  const auto end_piece = [&](size_t end) {
    const auto piece = text.substr(done, end - done);
    each.behavior == Behavior::Replaced ? static_cast<void>(replaced += piece)
                                        : cut(step + 1, piece, done == 0 ? place : Place::Inside, scratch, take);
    done = end;
  };
  each.pattern->each_match(text, scratch, [&](const Pattern::Match& match) {
    if (each.behavior != Behavior::EndsPiece) end_piece(match.begin);
    if (each.behavior == Behavior::Replaced) replaced += each.by;
    if (each.behavior == Behavior::Replaced || each.behavior == Behavior::Removed) done = match.end;
    if (each.behavior == Behavior::Isolated || each.behavior == Behavior::EndsPiece) end_piece(match.end);
  });
  end_piece(text.size());
  cut(step + 1, replaced, place, scratch, take);
}

const KnownPreTokenizer* find_pre_tokenizer(std::string_view name) {
  for (const auto& known : all_known()) {
    if (!name.empty() && (name == known.name || name == known.other_name)) return &known;
  }
  return nullptr;
}

const KnownPreTokenizer* find_pre_tokenizer(const PreTokenizer& pre) {
  for (const auto& known : all_known()) {
    const bool is_same = std::ranges::equal(pre.steps(), known.patterns, [](const PreTokenizer::Step& step, std::string_view pattern) {
      return step.pattern && step.pattern->text() == pattern && step.behavior == PreTokenizer::Behavior::Isolated &&
             step.prefix == PreTokenizer::Prefix::Never;
    });
    if (is_same) return &known;
  }
  return nullptr;
}

std::string names_of_pre_tokenizers() {
  std::vector<std::string_view> names;
  for (const auto& known : all_known()) names.push_back(known.name);
  return joined(names);
}

}  // namespace tessera::data
