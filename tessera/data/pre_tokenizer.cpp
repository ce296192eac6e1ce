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

std::string with_spaces(std::string_view text, std::string_view space) {
  std::string result;
  result.reserve(text.size() + text.size() / 2);
  for (const auto byte : text) byte == ' ' ? result.append(space) : result.append(1, byte);
  return result;
}

}  // namespace

void PreTokenizer::cut(size_t step, std::string_view text, Place place, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const {
  if (text.empty()) return;
  if (step == steps_.size()) return take(text);
  const auto& each = steps_[step];
  std::string changed;
  if (!each.space.empty()) text = changed = with_spaces(text, each.space);
  const bool adds = each.prefix == Prefix::Always || (each.prefix == Prefix::First && place == Place::Begin);
  const std::string_view space = each.space.empty() ? " " : std::string_view(each.space);
  if (adds && !text.starts_with(space)) text = changed = fmt::format("{}{}", space, text);
  size_t done = 0;
  const auto end_piece = [&](size_t end) {
    cut(step + 1, text.substr(done, end - done), done == 0 ? place : Place::Inside, scratch, take);
    done = end;
  };
  const auto take_match = [&](size_t begin, size_t end) {
    if (each.behavior != Behavior::EndsPiece) end_piece(begin);
    if (each.behavior == Behavior::Removed) done = end;
    if (each.behavior == Behavior::Isolated || each.behavior == Behavior::EndsPiece) end_piece(end);
  };
  if (each.literal.empty()) {
    each.pattern.each_match(text, scratch, [&](const Pattern::Match& match) { take_match(match.begin, match.end); });
  } else {
    for (auto at = text.find(each.literal); at != std::string_view::npos; at = text.find(each.literal, at + each.literal.size()))
      take_match(at, at + each.literal.size());
  }
  end_piece(text.size());
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
      return step.pattern.text() == pattern && step.behavior == PreTokenizer::Behavior::Isolated && step.space.empty() &&
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
