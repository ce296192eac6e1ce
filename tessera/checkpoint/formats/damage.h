// The errors of what reads damaged files.
#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/checksum.h"

namespace tessera::checkpoint {

/// Throws errors about one file, which begin with the same words.
class Damage {
 public:
  /// Errors begin with these words: "FILE is damaged: ".
  explicit Damage(std::string where) : where_(std::move(where)) {}

  /// Throws IoError.
  template <class... Values>
  [[noreturn]] void operator()(FormatString<std::type_identity_t<Values>...> why, const Values&... values) const {
    throw IoError(where_ + formatted(why, values...));
  }

 private:
  std::string where_;
};

/// Throws IoError unless a text is as it was written, given the checksums of itself and of its parts that it has under this key.
inline void expect_as_written(std::string_view text, const std::string& checksums, size_t parts, std::string_view key) {
  const auto own = checksum_around(text, checksums);
  if (checksums.size() != Checksum::kDigits * (parts + 1) || !own)
    throw IoError("it has {} parts, but checksums with {} digits", parts, checksums.size());
  if (*own == checksums.substr(0, Checksum::kDigits)) return;
  throw IoError(
      "it has another checksum than when it was written, so a bit has changed; or a program has rewritten it and kept '{}', which then has "
      "to be left out",
      key);
}

}  // namespace tessera::checkpoint
