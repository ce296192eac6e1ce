#include "tessera/data/pre_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"

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

struct Named {
  std::string_view name, other_name;
  std::vector<std::string> patterns;
};

const std::array<Named, 5>& all_named() {
  static const std::array<Named, 5> named = {{{"gpt2", "gpt-2", {kGpt2Pattern}},
                                              {"llama3", "llama-bpe", {kLlama3}},
                                              {"qwen2", "qwen2", {kQwen2}},
                                              {"smollm", "smollm", {kDigitPattern, kGpt2Pattern}},
                                              {"tekken", "tekken", {kTekken}}}};
  return named;
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
    // A match of no characters cuts, too, but not where the one before it ended.
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

PreTokenizer pre_tokenizer_named(std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& named : all_named()) {
    known.push_back(named.name);
    if (name != named.name && name != named.other_name) continue;
    std::vector<PreTokenizer::Step> steps;
    for (const auto& pattern : named.patterns) steps.push_back({.pattern = Pattern(pattern)});
    return PreTokenizer(std::move(steps));
  }
  throw ConfigError("there is no pre-tokenizer '{}' here; those that are: {}", printable(std::string(name)), joined(known));
}

std::string_view name_of(const PreTokenizer& pre) {
  for (const auto& named : all_named()) {
    const bool is_same = std::ranges::equal(pre.steps(), named.patterns, [](const PreTokenizer::Step& step, const std::string& pattern) {
      return step.pattern.text() == pattern && step.behavior == PreTokenizer::Behavior::Isolated && !step.adds_space;
    });
    if (is_same) return named.name;
  }
  return {};
}

}  // namespace tessera::data
