// Unicode characters of a text, and the properties of characters that tokenizers need.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::data {

/// The place of the first byte that belongs to no character of UTF-8; nothing if all do.
std::optional<size_t> invalid_utf8(std::string_view text);

/// The text with U+FFFD in place of each incomplete character, and of each other invalid byte.
std::string with_replacements(std::string_view text);
/// first_character(), length_of_first() and last_character() take UTF-8 text that is not empty.
char32_t first_character(std::string_view text);
size_t length_of_first(std::string_view text);
size_t last_character(std::string_view text);  // the place where the last character begins

/// Throws UsageError, with the place, if the text is not UTF-8.
std::u32string characters_of(std::string_view text);
std::string to_utf8(std::u32string_view text);

enum class NormalForm {
  Composed,    // NFC: é is one character
  Decomposed,  // NFD: é is e and an accent
};
std::u32string normalized(std::u32string_view text, NormalForm form);
/// Normalizes as Hugging Face's library tokenizers does: characters newer than Unicode 9 stay as and where they are.
std::u32string normalized_for_tokens(std::u32string_view text, NormalForm form);

/// The text in lower case, each character without regard to its neighbours.
std::u32string in_lower_case(std::u32string_view text);

bool is_word(char32_t character);         // a letter, a mark, a digit, an underscore or other connector
bool is_white(char32_t character);        // White_Space of Unicode
bool is_space(char32_t character);        // separates words; also line breaks and tabs
bool is_control(char32_t character);      // is invisible and not a space: controls, formats, unassigned characters
bool is_punctuation(char32_t character);  // also all ASCII characters that are neither letters nor digits nor spaces, such as $ and ^
bool is_accent(char32_t character);       // is drawn on the character before it and takes no space
bool is_ideograph(char32_t character);    // a Chinese character; Chinese is written without spaces

}  // namespace tessera::data
