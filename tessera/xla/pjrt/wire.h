// Protobuf's wire format, as much as PJRT needs: numbers and byte strings, written in order and read in order.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::pjrt {

class WireWriter {
 public:
  WireWriter& number(int field, int64_t value);
  WireWriter& bytes(int field, std::string_view value);
  /// Writes a number without a field, for packed lists.
  WireWriter& packed(uint64_t value);

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// Iterates over the fields of a message, and stops at a field that is cut off.
class WireReader {
 public:
  explicit WireReader(std::string_view message) : rest_(message) {}

  /// Moves to the next field. Returns false at the end of the message.
  bool next();
  /// Moves to the next number of a packed list, which has no fields.
  bool next_packed() { return read(number_); }
  int field() const { return field_; }
  uint64_t number() const { return number_; }
  /// A byte string or an inner message; empty for numbers.
  std::string_view bytes() const { return bytes_; }

 private:
  bool read(uint64_t& value);

  std::string_view rest_, bytes_;
  int field_ = 0;
  uint64_t number_ = 0;
};

}  // namespace tessera::pjrt
