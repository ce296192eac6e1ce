#include "tessera/xla/pjrt/wire.h"

namespace tessera::pjrt {

WireWriter& WireWriter::packed(uint64_t value) {
  for (; value > 127; value >>= 7) text_ += static_cast<char>(value | 128);
  text_ += static_cast<char>(value);
  return *this;
}

WireWriter& WireWriter::number(int field, int64_t value) {
  packed(static_cast<uint64_t>(field) << 3);
  return packed(static_cast<uint64_t>(value));
}

WireWriter& WireWriter::bytes(int field, std::string_view value) {
  packed(static_cast<uint64_t>(field) << 3 | 2);
  packed(value.size());
  text_ += value;
  return *this;
}

bool WireReader::read(uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 127) << shift;
    if (byte < 128) return true;
  }
  return false;
}

bool WireReader::next() {
  uint64_t key = 0;
  if (!read(key)) return false;
  field_ = static_cast<int>(key >> 3);
  bytes_ = {};
  number_ = 0;
  uint64_t length = 0;
  switch (key & 7) {
    case 0:
      return read(number_);
    case 1:
      length = 8;
      break;
    case 5:
      length = 4;
      break;
    case 2:
      if (!read(length)) return false;
      break;
    default:
      return false;
  }
  if (length > rest_.size()) return false;
  bytes_ = rest_.substr(0, length);
  rest_.remove_prefix(length);
  return true;
}

}  // namespace tessera::pjrt
