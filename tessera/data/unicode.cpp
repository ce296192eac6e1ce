#include "tessera/data/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/data/character_set.h"

namespace tessera::data {
namespace {

constexpr char32_t kDottedI = U'\u0130';  // the only character whose lower case is two characters in every language

const utf8proc_uint8_t* bytes_of(std::string_view text) {
  return reinterpret_cast<const utf8proc_uint8_t*>(text.data());
}

/// Calls visit(character) for each character. Returns the place of the first byte that is not UTF-8, and stops there; nothing if all are.
template <class Visit>
std::optional<size_t> each_character(std::string_view text, const Visit& visit) {
  for (size_t at = 0; at < text.size();) {
    utf8proc_int32_t character = 0;
    const auto length = utf8proc_iterate(bytes_of(text) + at, static_cast<utf8proc_ssize_t>(text.size() - at), &character);
    if (length <= 0) return at;
    visit(static_cast<char32_t>(character));
    at += static_cast<size_t>(length);
  }
  return std::nullopt;
}

utf8proc_category_t category_of(char32_t character) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(character));
}

bool separates(char32_t character) {
  const auto category = category_of(character);
  return category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP;
}

}  // namespace

std::optional<size_t> invalid_utf8(std::string_view text) {
  return each_character(text, [](char32_t) {});
}

std::string with_replacements(std::string_view text) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  const auto byte = [&](size_t at) { return at < text.size() ? static_cast<uint8_t>(text[at]) : uint8_t{0}; };
  const auto in = [](uint8_t value, int low, int high) { return value >= low && value <= high; };
  std::string result;
  result.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const auto first = byte(at);
    const size_t length = first < 0x80 ? 1 : in(first, 0xC2, 0xDF) ? 2 : in(first, 0xE0, 0xEF) ? 3 : in(first, 0xF0, 0xF4) ? 4 : 0;
    size_t good = length == 0 ? 0 : 1;
    // The second byte has its own bounds, which exclude surrogates, characters that have a shorter form, and those after U+10FFFF.
    const int low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80, high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
    while (good > 0 && good < length && in(byte(at + good), good == 1 ? low : 0x80, good == 1 ? high : 0xBF)) good++;
    result.append(good == length && length > 0 ? text.substr(at, length) : kReplacement);
    at += std::max<size_t>(good, 1);
  }
  return result;
}

char32_t first_character(std::string_view text) {
  utf8proc_int32_t character = 0;
  utf8proc_iterate(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &character);
  return static_cast<char32_t>(character);
}

size_t length_of_first(std::string_view text) {
  size_t length = 1;
  while (length < text.size() && (static_cast<uint8_t>(text[length]) & 0xC0) == 0x80) length++;
  return length;
}

size_t last_character(std::string_view text) {
  auto at = text.size() - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) at--;
  return at;
}

std::u32string characters_of(std::string_view text) {
  std::u32string characters;
  characters.reserve(text.size());
  if (const auto at = each_character(text, [&](char32_t character) { characters.push_back(character); })) {
    throw UsageError("a text is not UTF-8: its byte {} is {:#04x}, which begins no character; convert it, for example with iconv", *at,
                     static_cast<unsigned char>(text[*at]));
  }
  return characters;
}

std::string to_utf8(std::u32string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (const auto character : text) {
    utf8proc_uint8_t encoded[4];
    const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), encoded);
    bytes.append(reinterpret_cast<const char*>(encoded), static_cast<size_t>(length));
  }
  return bytes;
}

std::u32string normalized(std::u32string_view text, NormalForm form) {
  const auto bytes = to_utf8(text);
  const auto options = UTF8PROC_STABLE | (form == NormalForm::Composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE);
  utf8proc_uint8_t* made = nullptr;
  const auto length =
      utf8proc_map(bytes_of(bytes), static_cast<utf8proc_ssize_t>(bytes.size()), &made, static_cast<utf8proc_option_t>(options));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(made, &std::free);
  if (length < 0) throw Error("a text can't be normalized: {}", utf8proc_errmsg(length));
  return characters_of({reinterpret_cast<const char*>(made), static_cast<size_t>(length)});
}

std::u32string normalized_for_tokens(std::u32string_view text, NormalForm form) {
  // Characters of Unicode 10 to 16 that normalization would reorder or change.
  static const CharacterSet newer(
      {{0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},     {0xD3B, 0xD3C},
       {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1AFF},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x105C0, 0x105FF},
       {0x10D24, 0x10D27}, {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10EFC, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
       {0x11070, 0x11070}, {0x11241, 0x11241}, {0x1133B, 0x1133B}, {0x11380, 0x113FF}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
       {0x11930, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D45},
       {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16100, 0x1613F}, {0x16D40, 0x16D7F}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F},
       {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF}});
  std::u32string result;
  for (size_t done = 0; done < text.size();) {
    size_t end = done;
    while (end < text.size() && !newer.contains(text[end])) end++;
    if (end > done) result += normalized(text.substr(done, end - done), form);
    for (; end < text.size() && newer.contains(text[end]); end++) result += text[end];
    done = end;
  }
  return result;
}

std::u32string in_lower_case(std::u32string_view text) {
  std::u32string lower;
  lower.reserve(text.size());
  for (const auto character : text) {
    if (character == kDottedI) {
      lower += U"i\u0307";
    } else {
      lower.push_back(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character))));
    }
  }
  return lower;
}

bool is_word(char32_t character) {
  static const auto words = *characters_named("word") | CharacterSet({{0x200C, 0x200D}});
  return words.contains(character);
}

bool is_white(char32_t character) {
  return (character >= U'\t' && character <= U'\r') || character == U'\u0085' || separates(character);
}

bool is_space(char32_t character) {
  return character == U'\t' || character == U'\n' || character == U'\r' || separates(character);
}

bool is_control(char32_t character) {
  const auto category = category_of(character);
  return !is_space(character) && (category == UTF8PROC_CATEGORY_CN || category >= UTF8PROC_CATEGORY_CC);
}

bool is_punctuation(char32_t character) {
  if (character < 128) return character > 32 && character < 127 && std::isalnum(static_cast<int>(character)) == 0;
  const auto category = category_of(character);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_accent(char32_t character) {
  return category_of(character) == UTF8PROC_CATEGORY_MN;
}

bool is_ideograph(char32_t character) {
  static const CharacterSet ideographs({{0x3400, 0x4DBF},
                                        {0x4E00, 0x9FFF},
                                        {0xF900, 0xFAFF},
                                        {0x20000, 0x2A6DF},
                                        {0x2A700, 0x2B73F},
                                        {0x2B740, 0x2B81F},
                                        {0x2B820, 0x2CEAF},
                                        {0x2F800, 0x2FA1F}});
  return ideographs.contains(character);
}

}  // namespace tessera::data
