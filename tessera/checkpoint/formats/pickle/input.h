// Input: reads the bytes of a pickle from front to back.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::checkpoint::pickle {

class Input {
 public:
  Input(std::string_view bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  template <class... Values>
  [[noreturn]] void fail(FormatString<std::type_identity_t<Values>...> why, const Values&... values) const {
    throw IoError("{} is damaged, or Tessera can't read it: byte {} of its pickle: {}", where_, begin_, formatted(why, values...));
  }

  size_t size() const { return bytes_.size(); }
  size_t left() const { return bytes_.size() - next_; }
  const std::string& where() const { return where_; }

  char instruction() {
    begin_ = next_;
    return static_cast<char>(number(1));
  }
  std::string_view text(uint64_t count) {
    if (count > left()) fail("it is cut off");
    const auto result = bytes_.substr(next_, count);
    next_ += count;
    return result;
  }
  uint64_t number(size_t bytes) {
    uint64_t result = 0;
    std::memcpy(&result, text(bytes).data(), bytes);  // pickles are little-endian, as this machine is
    return result;
  }
  std::string_view line() {
    const auto end = bytes_.find('\n', next_);
    if (end == std::string_view::npos) fail("it is cut off");
    const auto result = text(end - next_);
    next_++;
    return result;
  }

 private:
  const std::string_view bytes_;
  const std::string& where_;
  size_t next_ = 0, begin_ = 0;  // positions of the next byte, and of the current instruction
};

}  // namespace tessera::checkpoint::pickle
