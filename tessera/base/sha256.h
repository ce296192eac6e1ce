// SHA-256 and the HMAC over it, for proofs that a process knows a secret.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// The digest as 32 bytes (FIPS 180-4).
std::string sha256(std::string_view bytes);
/// The code of a message under a key, as 32 bytes (RFC 2104).
std::string hmac_sha256(std::string_view key, std::string_view message);

}  // namespace tessera
