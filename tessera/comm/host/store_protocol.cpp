#include "tessera/comm/host/store_protocol.h"

#include <fmt/format.h>

#include <cstring>

#include "tessera/base/error.h"

namespace tessera::store_protocol {

std::string sized(std::string_view bytes) {
  const auto length = static_cast<uint32_t>(bytes.size());
  std::string result(sizeof length, '\0');
  std::memcpy(result.data(), &length, sizeof length);
  return result.append(bytes);
}

std::optional<std::string> take_sized(std::string& bytes, size_t longest) {
  uint32_t length = 0;
  if (bytes.size() < sizeof length) return std::nullopt;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length > longest) throw IoError(fmt::format("a message of {} bytes, where at most {} are allowed", length, longest));
  if (bytes.size() - sizeof length < length) return std::nullopt;
  auto result = bytes.substr(sizeof length, length);
  bytes.erase(0, sizeof length + length);
  return result;
}

std::string pack(const Fields& fields) {
  std::string frame;
  for (const auto& field : fields) frame += sized(field);
  return sized(frame);
}

Fields unpack(std::string frame) {
  Fields fields;
  while (!frame.empty()) {
    auto field = take_sized(frame, frame.size());
    if (!field) throw IoError("a message that is cut off");
    fields.push_back(std::move(*field));
  }
  return fields;
}

}  // namespace tessera::store_protocol
