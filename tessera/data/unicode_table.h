// Which characters are letters, numbers and so on, for cutting texts as Hugging Face's library does.
#pragma once

#include <span>
#include <string_view>

namespace tessera::data {

/// Unicode characters with a name in lower case: that of a category ("lu"), of a script ("latin"), or of a property ("alphabetic"), which
/// has those of other categories than letters. What is in no category ("cn") is not listed.
struct NamedCharacters {
  std::string_view name;
  /// From 0 on, how many characters in a row are not in it, are in it, are not, and so on. A letter is a length from 1 (a) to 26 (z) and
  /// 52 (Z); others are decimal, with a space between two of them.
  std::string_view lengths;
};
extern const std::span<const NamedCharacters> kNamedCharacters;

}  // namespace tessera::data
