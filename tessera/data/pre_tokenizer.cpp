#include "tessera/data/pre_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

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

}  // namespace

void PreTokenizer::cut(size_t step, std::string_view text, Scratch& scratch, c10::function_ref<void(std::string_view)> take) const {
  if (text.empty()) return;
  if (step == steps_.size()) return take(text);
  const auto& [pattern, behavior, adds_space] = steps_[step];
  std::string with_space;
  if (adds_space && text.front() != ' ') text = with_space = fmt::format(" {}", text);
  size_t done = 0;
  std::optional<size_t> last_end;
  Pattern::Match match;
  for (size_t from = 0; from <= text.size() && pattern.find(text, from, scratch, match);) {
    // An empty match cuts, too, unless it is where the previous match ended.
    if (match.end == match.begin && match.end == last_end) {
      from += from < text.size() ? length_of_first(text.substr(from)) : 1;
      continue;
    }
    cut(step + 1, text.substr(done, match.begin - done), scratch, take);
    if (behavior == Behavior::Isolated) cut(step + 1, text.substr(match.begin, match.end - match.begin), scratch, take);
    done = from = match.end;
    last_end = match.end;
  }
  cut(step + 1, text.substr(done), scratch, take);
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
      return step.pattern.text() == pattern && step.behavior == PreTokenizer::Behavior::Isolated && !step.adds_space;
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
