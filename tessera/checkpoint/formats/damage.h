// Errors about damaged files.
#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/checksum.h"

namespace tessera::checkpoint {

/// Throws errors about one file.
class Damage {
 public:
  /// All errors begin with `where`, such as "FILE is damaged: ".
  explicit Damage(std::string where) : where_(std::move(where)) {}

  /// Throws IoError.
  template <class... Values>
  [[noreturn]] void operator()(FormatString<std::type_identity_t<Values>...> why, const Values&... values) const {
    throw IoError(where_ + formatted(why, values...));
  }

 private:
  std::string where_;
};

/// Throws IoError unless a text is as it was written. The text contains `checksums` under `key`: the checksum of the text itself, and one
/// checksum for each part.
inline void expect_as_written(std::string_view text, const std::string& checksums, size_t parts, std::string_view key) {
  const auto own = checksum_around(text, checksums);
  if (checksums.size() != Checksum::kDigits * (parts + 1) || !own)
    throw IoError("it has {} parts, but its checksums have {} digits", parts, checksums.size());
  if (*own == checksums.substr(0, Checksum::kDigits)) return;
  throw IoError(
      "it has another checksum than when it was written: it is damaged, or a program has rewritten it and kept '{}', which such a program "
      "must leave out",
      key);
}

}  // namespace tessera::checkpoint
