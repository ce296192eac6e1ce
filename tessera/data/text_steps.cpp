#include "tessera/data/text_steps.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/data/unigram.h"

namespace tessera::data {
namespace {

bool is_ascii(std::string_view text) {
  return std::ranges::none_of(text, [](char byte) { return static_cast<uint8_t>(byte) >= 0x80; });
}

/// The size of the first grapheme cluster of the text.
size_t first_grapheme(std::string_view text) {
  utf8proc_int32_t state = 0;
  auto end = length_of_first(text);
  for (auto before = first_character(text); end < text.size();) {
    const auto next = first_character(text.substr(end));
    if (utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(before), static_cast<utf8proc_int32_t>(next), &state)) break;
    end += length_of_first(text.substr(end));
    before = next;
  }
  return end;
}

}  // namespace

TextStep normalizing(NormalForm form) {
  return [form](std::string& text) {
    if (!is_ascii(text)) text = to_utf8(normalized_for_tokens(characters_of(text), form));
  };
}

TextStep prepending(std::string text) {
  return [prefix = std::move(text)](std::string& text) {
    if (!text.empty()) text.insert(0, prefix);
  };
}

TextStep replacing(std::shared_ptr<const Pattern> pattern, std::string literal, std::string by) {
  return [=](std::string& text) {
    std::string result;
    size_t done = 0;
    const auto replace = [&](size_t begin, size_t end) {
      result.append(text, done, begin - done).append(by);
      done = end;
    };
    if (!literal.empty()) {
      for (auto at = text.find(literal); at != std::string::npos; at = text.find(literal, done)) replace(at, at + literal.size());
    } else {
      Pattern::Scratch scratch;
      pattern->each_match(text, scratch, [&](const Pattern::Match& match) { replace(match.begin, match.end); });
    }
    if (done == 0 && result.empty()) return;
    text = result.append(text, done);
  };
}

TextStep stripping(bool left, bool right) {
  return [=](std::string& text) {
    std::string_view kept = text;
    while (left && !kept.empty() && is_white(first_character(kept))) kept.remove_prefix(length_of_first(kept));
    while (right && !kept.empty() && is_white(first_character(kept.substr(last_character(kept))))) kept = kept.substr(0, last_character(kept));
    text = std::string(kept);
  };
}

TextStep changing_characters(std::function<void(std::u32string&)> change) {
  return [change = std::move(change)](std::string& text) {
    auto characters = characters_of(text);
    change(characters);
    text = to_utf8(characters);
  };
}

Charsmap::Charsmap(std::string_view table, Match match) : match_(match) {
  uint32_t size = 0;
  if (table.size() >= sizeof size) std::memcpy(&size, table.data(), sizeof size);
  if (size == 0 || size % sizeof(uint32_t) != 0 || size >= table.size() - sizeof size || table.back() != '\0')
    throw ConfigError("precompiled_charsmap is damaged: it holds {} bytes", table.size());
  units_.resize(size / sizeof(uint32_t));
  std::memcpy(units_.data(), table.data() + sizeof size, size);
  texts_ = table.substr(sizeof size + size);
}

Charsmap::Found Charsmap::find(std::string_view text, Match match) const {
  const auto unit = [&](uint32_t place) { return place < units_.size() ? units_[place] : 0; };
  const auto offset = [](uint32_t unit) { return (unit >> 10) << ((unit & 0x200) >> 6); };
  Found found;
  auto place = offset(unit(0));
  for (size_t at = 0; at < text.size(); at++) {
    const auto byte = static_cast<uint8_t>(text[at]);
    place ^= byte;
    const auto here = unit(place);
    if (byte == 0 || (here & 0x800000FF) != byte) break;
    place ^= offset(here);
    if ((here & 0x100) == 0) continue;
    const auto begin = unit(place) & 0x7FFFFFFF;
    if (begin < texts_.size()) found = {.length = at + 1, .text = texts_.c_str() + begin};
    if (match == Match::Graphemes) break;  // tokenizers takes the shortest entry with which a grapheme begins
  }
  return found;
}

void Charsmap::operator()(std::string& text) const {
  constexpr size_t kLongestGrapheme = 5;  // bytes; the characters of longer ones are replaced one by one
  std::string result;
  result.reserve(text.size());
  for (std::string_view rest = text; !rest.empty();) {
    if (match_ == Match::Longest) {
      const auto found = find(rest, match_);
      const auto length = found.length > 0 ? found.length : length_of_first(rest);
      result += found.length > 0 ? found.text : rest.substr(0, length);
      rest.remove_prefix(length);
      continue;
    }
    const auto take = [&](std::string_view part) {
      const auto found = find(part, match_);
      if (found.length > 0) result += found.text;
      return found.length > 0;
    };
    auto grapheme = rest.substr(0, first_grapheme(rest));
    rest.remove_prefix(grapheme.size());
    if (grapheme.size() <= kLongestGrapheme && take(grapheme)) continue;
    for (; !grapheme.empty(); grapheme.remove_prefix(length_of_first(grapheme))) {
      const auto character = grapheme.substr(0, length_of_first(grapheme));
      if (!take(character)) result += character;
    }
  }
  text = std::move(result);
}

void join_bytes(std::vector<std::string>& tokens) {
  std::vector<std::string> joined;
  std::string bytes;
  const auto end_bytes = [&] {
    if (invalid_utf8(bytes)) {
      joined.insert(joined.end(), bytes.size(), "\uFFFD");
    } else if (!bytes.empty()) {
      joined.push_back(bytes);
    }
    bytes.clear();
  };
  for (auto& token : tokens) {
    if (const auto byte = byte_of_piece(token)) {
      bytes += static_cast<char>(*byte);
      continue;
    }
    end_bytes();
    joined.push_back(std::move(token));
  }
  end_bytes();
  tokens = std::move(joined);
}

}  // namespace tessera::data
