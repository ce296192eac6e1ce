#include "tessera/data/pattern_program.h"

#include <algorithm>
#include <span>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

using Kind = PatternNode::Kind;
using Op = PatternStep::Op;

constexpr size_t kMostSteps = 1 << 16, kMostTargets = 64;
constexpr size_t kEmpty = 256;  // the bit of Begins that marks a part that may take no characters

class PatternCompiler {
 public:
  PatternSteps compile(const PatternNode& pattern) {
    made_.begins = begins_of(pattern);
    add(pattern);
    add(PatternStep{.op = Op::Accept});
    for (size_t i = 0; i < made_.steps.size(); i++) {
      // A Run that is followed only by jumps to Accept never has to give characters back, because no later step can fail.
      auto behind = i + 1;
      if (made_.steps[i].op != Op::Run) continue;
      while (made_.steps[behind].op == Op::Jump) behind = made_.steps[behind].target;
      if (made_.steps[behind].op == Op::Accept) made_.steps[i].keeps = true;
    }
    return std::move(made_);
  }

 private:
  using Begins = std::bitset<257>;

  uint32_t here() const { return static_cast<uint32_t>(made_.steps.size()); }

  uint32_t add(PatternStep step) {
    if (made_.steps.size() >= kMostSteps) throw ConfigError("a regular expression that repeats too much is not read here");
    made_.steps.push_back(step);
    return here() - 1;
  }

  uint32_t table_of(const CharacterSet& set) {
    for (size_t i = 0; i < sets_.size(); i++) {
      if (sets_[i].ranges() == set.ranges()) return static_cast<uint32_t>(i);
    }
    sets_.push_back(set);
    made_.sets.emplace_back(set);
    return static_cast<uint32_t>(sets_.size() - 1);
  }

  Begins begins_of(const PatternNode& node) {
    Begins begins;
    switch (node.kind) {
      case Kind::Set: {
        const auto& table = made_.sets[table_of(node.set)];
        for (size_t byte = 0; byte < 256; byte++) begins[byte] = table.may_begin_with(static_cast<uint8_t>(byte));
        break;
      }
      case Kind::Choice:
        for (const auto& part : node.parts) begins |= begins_of(part);
        break;
      case Kind::Sequence:
      case Kind::Atomic:
        begins.set(kEmpty);
        for (const auto& part : node.parts) {
          if (!begins[kEmpty]) break;
          begins.reset(kEmpty);
          begins |= begins_of(part);
        }
        break;
      case Kind::Repeat:
        begins = begins_of(node.parts.front());
        if (node.least == 0) begins.set(kEmpty);
        break;
      case Kind::Ahead:
      case Kind::Behind:
      case Kind::Place:
        begins.set(kEmpty);
    }
    return begins;
  }

  void add(const PatternNode& node) {
    switch (node.kind) {
      case Kind::Set:
        add(PatternStep{.op = Op::Set, .which = table_of(node.set)});
        break;
      case Kind::Sequence:
        for (const auto& part : node.parts) add(part);
        break;
      case Kind::Choice:
        add_choice(node.parts);
        break;
      case Kind::Repeat:
        add_repeat(node);
        break;
      case Kind::Ahead:
      case Kind::Atomic: {
        const auto begin = add(PatternStep{.op = node.kind == Kind::Ahead ? Op::Ahead : Op::Atomic, .negative = node.negative});
        for (const auto& part : node.parts) add(part);
        add(PatternStep{.op = Op::Accept});
        made_.steps[begin].target = here();
        break;
      }
      case Kind::Behind:
        add(PatternStep{.op = Op::Behind, .negative = node.negative, .which = table_of(node.set)});
        break;
      case Kind::Place:
        add(PatternStep{.op = Op::Place, .place = node.place});
    }
  }

  void add_choice(std::span<const PatternNode> parts) {
    const auto which = made_.branches.size();
    made_.branches.emplace_back();
    add(PatternStep{.op = Op::Branch, .which = static_cast<uint32_t>(which)});
    PatternBranch branch;
    std::vector<uint32_t> ends;
    for (size_t i = 0; i < parts.size(); i++) {
      branch.targets.push_back(here());
      const bool is_rest = i + 1 == kMostTargets && parts.size() > kMostTargets;
      Begins begins;
      if (is_rest) {
        for (const auto& part : parts.subspan(i)) begins |= begins_of(part);
        add_choice(parts.subspan(i));
      } else {
        begins = begins_of(parts[i]);
        add(parts[i]);
      }
      if (begins[kEmpty]) begins.set();
      for (size_t byte = 0; byte < branch.by_byte.size(); byte++) branch.by_byte[byte] |= uint64_t{begins[byte]} << i;
      ends.push_back(add(PatternStep{.op = Op::Jump}));
      if (is_rest) break;
    }
    for (const auto end : ends) made_.steps[end].target = here();
    made_.branches[which] = std::move(branch);
  }

  void add_repeat(const PatternNode& node) {
    using Mode = PatternNode::Mode;
    const auto* part = &node.parts.front();
    while (part->kind == Kind::Sequence && part->parts.size() == 1) part = &part->parts.front();
    if (part->kind == Kind::Set && node.mode != Mode::Lazy) {
      add(PatternStep{
          .op = Op::Run, .which = table_of(part->set), .least = node.least, .most = node.most, .keeps = node.mode == Mode::Possessive});
      return;
    }
    if (node.most == kNoLimit && begins_of(*part)[kEmpty])
      throw ConfigError("a regular expression that repeats a part that may take no characters is not read here");
    const auto atomic = node.mode == Mode::Possessive ? std::optional(add(PatternStep{.op = Op::Atomic})) : std::nullopt;
    for (size_t i = 0; i < node.least; i++) {
      const auto before = here();
      add(*part);
      if (here() == before) break;  // a part without steps needs no repetition
    }
    std::vector<uint32_t> splits;
    const auto split = [&] { splits.push_back(add(PatternStep{.op = Op::Split})); };
    if (node.most == kNoLimit) {
      split();
      add(*part);
      add(PatternStep{.op = Op::Jump, .target = splits.front()});
    } else {
      for (size_t i = node.least; i < node.most; i++) {
        split();
        add(*part);
      }
    }
    for (const auto at : splits) {
      auto& step = made_.steps[at];
      step.target = at + 1, step.other = here();
      if (node.mode == Mode::Lazy) std::swap(step.target, step.other);
    }
    if (!atomic) return;
    add(PatternStep{.op = Op::Accept});
    made_.steps[*atomic].target = here();
  }

  PatternSteps made_;
  std::vector<CharacterSet> sets_;
};

/// Returns the first byte of a character in UTF-8, and the number of its bytes.
std::pair<uint8_t, uint8_t> head_of(char32_t character) {
  if (character < 0x80) return {static_cast<uint8_t>(character), uint8_t{1}};
  if (character < 0x800) return {static_cast<uint8_t>(0xC0 | (character >> 6)), uint8_t{2}};
  if (character < 0x10000) return {static_cast<uint8_t>(0xE0 | (character >> 12)), uint8_t{3}};
  return {static_cast<uint8_t>(0xF0 | (character >> 18)), uint8_t{4}};
}

}  // namespace

CharacterTable::CharacterTable(const CharacterSet& set) : bits_(2) {
  bits_[1].set();
  std::array<bool, 256> has_others{};
  const auto outside = ~set;
  for (const auto* characters : {&set, &outside}) {
    const bool inside = characters == &set;
    for (const auto& range : characters->ranges()) {
      const auto [first, shortest] = head_of(range.first);
      for (size_t byte = first; byte <= head_of(range.last).first; byte++) {
        if (inside) {
          by_first_byte_[byte] = byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
        } else {
          has_others[byte] = true;
        }
      }
      if (!inside) continue;
      for (auto page = range.first >> 8; page <= range.last >> 8; page++) {
        const auto begin = std::max<char32_t>(range.first, page << 8), end = std::min<char32_t>(range.last, (page << 8) | 0xFF);
        if (end - begin == 0xFF) {
          pages_[page] = 1;
          continue;
        }
        if (pages_[page] == 0) {
          pages_[page] = static_cast<uint16_t>(bits_.size());
          bits_.emplace_back();
        }
        for (auto character = begin; character <= end; character++) bits_[pages_[page]].set(character & 0xFF);
      }
    }
  }
  for (size_t byte = 0; byte < 256; byte++) {
    if (by_first_byte_[byte] != 0 && has_others[byte]) by_first_byte_[byte] = kLook;
  }
}

PatternSteps steps_of(const PatternNode& pattern) {
  return PatternCompiler().compile(pattern);
}

}  // namespace tessera::data
