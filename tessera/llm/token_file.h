// Reads files of tokens: documents one after the other, which processes map into memory. They are safetensors files, which Python can read,
// too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace tessera::llm {

/// A token that a model reads but does not learn to write, such as a token of a prompt, is stored as -1 - token.
constexpr int32_t only_read(int32_t token) {
  return -1 - token;
}
constexpr bool is_only_read(int32_t stored) {
  return stored < 0;
}
constexpr int32_t token_of(int32_t stored) {
  return stored < 0 ? -1 - stored : stored;
}

/// Maps a file of tokens into memory. Throws IoError if it is not such a file, or not laid out as by tokenize().
class TokenFile {
 public:
  static constexpr auto kFormat = "tessera tokens";

  explicit TokenFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::span<const int32_t> tokens() const { return tokens_; }  // as stored: see only_read()
  std::span<const int64_t> ends() const { return ends_; }      // the number of tokens up to the end of each document
  /// Whether each document with an even number is chosen, and the one after it rejected, both as answers to the same prompt.
  bool has_pairs() const { return pairs_; }
  /// One more than the largest token.
  int64_t vocabulary() const { return vocabulary_; }
  /// The checksum of the tokens; empty if another program has written the file without one.
  const std::string& checksum() const { return checksum_; }

 private:
  struct Mapping;
  std::filesystem::path path_;
  std::shared_ptr<const Mapping> mapping_;
  std::span<const int32_t> tokens_;
  std::span<const int64_t> ends_;
  int64_t vocabulary_ = 0;
  bool pairs_ = false;
  std::string checksum_;
};

}  // namespace tessera::llm
