// Damage: the error of what reads one file, whose words begin with the same.
#pragma once

#include <string>

#include "tessera/base/error.h"

namespace tessera::checkpoint {

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

}  // namespace tessera::checkpoint
