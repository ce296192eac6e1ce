#include "tessera/comm/host/store_protocol.h"

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/secret.h"

namespace tessera::store_protocol {

constexpr size_t kLengthBytes = sizeof(uint32_t);

std::string client_proof(const std::string& secret, const Numbers& numbers) {
  return proof_of(secret, {kHello, "client", numbers.client, numbers.server});
}

std::string server_proof(const std::string& secret, const Numbers& numbers) {
  return proof_of(secret, {kHello, "server", numbers.client, numbers.server});
}

std::string sized(std::string_view bytes) {
  const auto length = static_cast<uint32_t>(bytes.size());
  std::string result(sizeof length, '\0');
  std::memcpy(result.data(), &length, sizeof length);
  return result.append(bytes);
}

namespace {

/// Reads the length at `place`; nothing if the bytes end before it does.
std::optional<size_t> length_at(std::string_view bytes, size_t place) {
  uint32_t length = 0;
  if (bytes.size() - place < sizeof length) return std::nullopt;
  std::memcpy(&length, bytes.data() + place, sizeof length);
  return length;
}

}  // namespace

std::optional<std::string> take_sized(std::string& bytes, size_t longest) {
  const auto length = length_at(bytes, 0);
  if (!length) return std::nullopt;
  if (*length > longest) throw IoError("a message of {} bytes, where at most {} are allowed", *length, longest);
  if (bytes.size() - kLengthBytes < *length) return std::nullopt;
  auto result = bytes.substr(kLengthBytes, *length);
  bytes.erase(0, kLengthBytes + *length);
  return result;
}

std::string pack(const Fields& fields) {
  std::string frame;
  for (const auto& field : fields) frame += sized(field);
  return sized(frame);
}

Fields unpack(std::string_view frame) {
  Fields fields;
  for (size_t place = 0; place < frame.size();) {
    const auto length = length_at(frame, place);
    if (!length || frame.size() - place - kLengthBytes < *length) throw IoError("a message that is cut off");
    fields.emplace_back(frame.substr(place + kLengthBytes, *length));
    place += kLengthBytes + *length;
  }
  return fields;
}

}  // namespace tessera::store_protocol
