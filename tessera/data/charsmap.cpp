#include "tessera/data/charsmap.h"

#include <utf8proc.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/data/unicode.h"

namespace tessera::data {
namespace {

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

Charsmap::Charsmap(std::string table, Match match) : table_(std::move(table)), match_(match) {
  if (table_.size() >= sizeof size_) std::memcpy(&size_, table_.data(), sizeof size_);
  if (size_ == 0 || size_ % sizeof(uint32_t) != 0 || size_ >= table_.size() - sizeof size_ || table_.back() != '\0')
    throw ConfigError("precompiled_charsmap is damaged: it holds {} bytes", table_.size());
}

uint32_t Charsmap::unit(uint32_t place) const {
  uint32_t unit = 0;
  if (place < size_ / sizeof unit) std::memcpy(&unit, table_.data() + sizeof unit + place * sizeof unit, sizeof unit);
  return unit;
}

/// Adds the replacement of the beginning of `text` to the result, and returns the size of what it replaces; 0 if there is none.
size_t Charsmap::replace(std::string_view text, std::string& result) const {
  const auto offset = [](uint32_t unit) { return (unit >> 10) << ((unit & 0x200) >> 6); };
  size_t length = 0, begin = 0;
  auto place = offset(unit(0));
  for (size_t at = 0; at < text.size(); at++) {
    const auto byte = static_cast<uint8_t>(text[at]);
    place ^= byte;
    const auto here = unit(place);
    if (byte == 0 || (here & 0x800000FF) != byte) break;
    place ^= offset(here);
    if ((here & 0x100) == 0) continue;
    begin = sizeof size_ + size_ + (unit(place) & 0x7FFFFFFF);
    if (begin < table_.size()) length = at + 1;
    if (match_ == Match::Graphemes) break;  // tokenizers takes the shortest entry with which a grapheme begins
  }
  if (length > 0) result += table_.c_str() + begin;
  return length;
}

std::string Charsmap::operator()(std::string_view text) const {
  constexpr size_t kLongestGrapheme = 5;  // bytes; the characters of longer ones are replaced one by one
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0, grapheme_end = 0; at < text.size();) {
    auto part = text.substr(at);
    const auto character = part.substr(0, length_of_first(part));
    if (match_ == Match::Graphemes) {
      if (at == grapheme_end) {
        const auto grapheme = part.substr(0, first_grapheme(part));
        grapheme_end += grapheme.size();
        if (grapheme.size() <= kLongestGrapheme && replace(grapheme, result) > 0) {
          at = grapheme_end;
          continue;
        }
      }
      part = character;
    }
    const auto replaced = replace(part, result);
    if (replaced == 0) result += character;
    at += match_ == Match::Graphemes || replaced == 0 ? character.size() : replaced;
  }
  return result;
}

}  // namespace tessera::data
