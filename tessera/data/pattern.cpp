#include "tessera/data/pattern.h"

#include <bit>
#include <cctype>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/data/pattern_program.h"
#include "tessera/data/unicode.h"

namespace tessera::data {
namespace {

using Op = PatternStep::Op;
using Anchor = PatternNode::Place;

constexpr uint64_t kMostTries = 10'000'000;  // the most backtracking steps in one match; Oniguruma has the same limit

bool begins_character(char byte) {
  return (static_cast<uint8_t>(byte) & 0xC0) != 0x80;
}

/// Matches a compiled pattern with backtracking.
class PatternMatcher {
 public:
  PatternMatcher(const std::string& pattern, const PatternSteps& program, const CharacterTable& words, std::string_view text,
                 Pattern::Scratch& turns)
      : pattern_(pattern), program_(program), words_(words), begin_(text.data()), end_(text.data() + text.size()), turns_(turns) {}

  /// The end of the match that begins at `at` with this step, or null.
  const char* run(uint32_t step, const char* at);
  void begin_tries() { tries_ = 0; }

 private:
  /// Backtracks to the last alternative that was not tried yet; false if there is none.
  bool turn_back(size_t base, uint32_t& step, const char*& at);
  bool is_at(Anchor place, const char* at) const;
  bool is_word_at(const char* at) const { return at != end_ && words_.length_at(at) != 0; }

  static const char* before(const char* at) {
    do at--;
    while (!begins_character(*at));
    return at;
  }
  uint64_t targets_at(const PatternBranch& branch, const char* at) const {
    return branch.by_byte[at == end_ ? 256 : static_cast<uint8_t>(*at)];
  }

  const std::string& pattern_;
  const PatternSteps& program_;
  const CharacterTable& words_;
  const char *const begin_, *const end_;
  Pattern::Scratch& turns_;
  uint64_t tries_ = 0;
};

const char* PatternMatcher::run(uint32_t step, const char* at) {
  const auto base = turns_.size();
  for (;;) {
    const auto& now = program_.steps[step];
    bool goes_on = true;
    switch (now.op) {
      case Op::Set: {
        const auto length = at == end_ ? 0 : program_.sets[now.which].length_at(at);
        goes_on = length != 0;
        at += length;
        step++;
        break;
      }
      case Op::Run: {
        const auto& set = program_.sets[now.which];
        size_t count = 0;
        while (count < now.most && at != end_) {
          const auto length = set.length_at(at);
          if (length == 0) break;
          at += length;
          count++;
        }
        goes_on = count >= now.least;
        if (goes_on && count > now.least && !now.keeps) turns_.push_back({step, at, count - now.least});
        step++;
        break;
      }
      case Op::Branch: {
        const auto& branch = program_.branches[now.which];
        const auto targets = targets_at(branch, at);
        goes_on = targets != 0;
        if (!goes_on) break;
        if (const auto others = targets & (targets - 1); others != 0) turns_.push_back({step, at, others});
        step = branch.targets[static_cast<size_t>(std::countr_zero(targets))];
        break;
      }
      case Op::Split:
        turns_.push_back({step, at, 0});
        step = now.target;
        break;
      case Op::Jump:
        step = now.target;
        break;
      case Op::Ahead:
        goes_on = (run(step + 1, at) != nullptr) != now.negative;
        step = now.target;
        break;
      case Op::Atomic: {
        const auto* end = run(step + 1, at);
        goes_on = end != nullptr;
        if (goes_on) at = end;
        step = now.target;
        break;
      }
      case Op::Behind:
        goes_on = (at != begin_ && program_.sets[now.which].length_at(before(at)) != 0) != now.negative;
        step++;
        break;
      case Op::Place:
        goes_on = is_at(now.place, at);
        step++;
        break;
      case Op::Accept:
        turns_.resize(base);
        return at;
    }
    if (!goes_on && !turn_back(base, step, at)) return nullptr;
  }
}

bool PatternMatcher::turn_back(size_t base, uint32_t& step, const char*& at) {
  if (turns_.size() == base) return false;
  if (++tries_ > kMostTries) throw Error("the regular expression '{}' takes too many tries for a text", pattern_);
  auto& turn = turns_.back();
  const auto& was = program_.steps[turn.step];
  if (was.op == Op::Run) {
    at = turn.at = before(turn.at);
    step = turn.step + 1;
    if (--turn.left == 0) turns_.pop_back();
  } else if (was.op == Op::Branch) {
    at = turn.at;
    step = program_.branches[was.which].targets[static_cast<size_t>(std::countr_zero(turn.left))];
    turn.left &= turn.left - 1;
    if (turn.left == 0) turns_.pop_back();
  } else {
    at = turn.at;
    step = was.other;
    turns_.pop_back();
  }
  return true;
}

bool PatternMatcher::is_at(Anchor place, const char* at) const {
  switch (place) {
    case Anchor::TextBegin:
      return at == begin_;
    case Anchor::TextEnd:
      return at == end_;
    case Anchor::LastLineEnd:
      return at == end_ || (at + 1 == end_ && *at == '\n');
    case Anchor::LineBegin:
      return at == begin_ || (at != end_ && at[-1] == '\n');
    case Anchor::LineEnd:
      return at == end_ || *at == '\n';
    case Anchor::WordEdge:
    case Anchor::InWord:
      break;
  }
  const bool is_edge = (at != begin_ && is_word_at(before(at))) != is_word_at(at);
  return is_edge == (place == Anchor::WordEdge);
}

}  // namespace

struct Pattern::Program {
  PatternSteps steps;
  CharacterTable words{word_characters()};
};

Pattern::Pattern(const std::string& text) : text_(text) {
  program_ = std::make_unique<const Program>(Program{.steps = steps_of(parse_pattern(text))});
}

Pattern Pattern::of_text(const std::string& text) {
  Pattern result(escaped_pattern(text));
  result.literal_ = text;
  return result;
}

Pattern::~Pattern() = default;
Pattern::Pattern(Pattern&&) noexcept = default;
Pattern& Pattern::operator=(Pattern&&) noexcept = default;

bool Pattern::find(std::string_view text, size_t from, Scratch& scratch, Match& match) const {
  const auto& steps = program_->steps;
  PatternMatcher matcher(text_, steps, program_->words, text, scratch);
  scratch.clear();
  const bool may_be_empty = steps.begins[256];
  for (const char *at = text.data() + from, *end = text.data() + text.size();; at++) {
    while (!may_be_empty && at != end && !steps.begins[static_cast<uint8_t>(*at)]) at++;
    if (at == end && !may_be_empty) return false;
    if (at != end && !begins_character(*at)) continue;
    matcher.begin_tries();
    if (const auto* found = matcher.run(0, at)) {
      match = {static_cast<size_t>(at - text.data()), static_cast<size_t>(found - text.data())};
      return true;
    }
    if (at == end) return false;
  }
}

void Pattern::each_match(std::string_view text, Scratch& scratch, c10::function_ref<void(const Match&)> take) const {
  if (!literal_.empty()) {
    for (auto at = text.find(literal_); at != std::string_view::npos; at = text.find(literal_, at + literal_.size()))
      take({at, at + literal_.size()});
    return;
  }
  std::optional<size_t> last_end;
  Match match;
  for (size_t from = 0; from <= text.size() && find(text, from, scratch, match);) {
    if (match.end == match.begin && match.end == last_end) {
      from += from < text.size() ? length_of_first(text.substr(from)) : 1;
      continue;
    }
    take(match);
    from = match.end;
    last_end = match.end;
  }
}

std::string escaped_pattern(std::string_view text) {
  std::string result;
  for (const char letter : text) {
    const bool stands_for_itself = static_cast<uint8_t>(letter) >= 0x80 || letter == '_' || std::isalnum(static_cast<uint8_t>(letter)) != 0;
    if (!stands_for_itself) result += '\\';
    result += letter;
  }
  return result;
}

}  // namespace tessera::data
