// The secret of a job, and proofs that a process knows it. Only the proofs travel.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The text of TESSERA_SECRET, or else of the file that TESSERA_SECRET_FILE names, or nothing if neither is set. Throws ConfigError if the
/// file can't be read, if others may read it, or if it is empty.
std::optional<std::string> given_secret();

/// A text of 32 hexadecimal digits that nobody can guess.
std::string random_secret();

/// 32 bytes that only a process with the secret can make for these words.
std::string proof_of(std::string_view secret, std::initializer_list<std::string_view> words);
inline constexpr size_t kProofBytes = 32;

/// Compares in a time that does not depend on how far the texts agree.
bool same_proof(std::string_view a, std::string_view b);

}  // namespace tessera
