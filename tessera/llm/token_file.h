// Makes and reads files of tokens: documents one after the other, which processes map into memory. They are safetensors files, which Python
// can read, too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/tokenizer.h"
#include "tessera/llm/chat.h"

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

struct TokenizeOptions {
  std::optional<ChatTemplate> chat = {};  // for lines with messages
  std::optional<int32_t> end = {};        // the token after each document, unless the template ends it with its own
  int threads = 0;                        // 0: as many as there are cores
  /// Called with the number of bytes that are tokenized so far, and the number of bytes of all files. Return false to stop: finished parts
  /// stay for the next call.
  std::function<bool(uint64_t done, uint64_t all)> progress = {};
};

struct Tokenized {
  int64_t documents = 0, tokens = 0, trained = 0;
  int64_t found = 0;  // parts that an earlier call had finished already
};

/// Returns the tokens of one line of JSON: {"text"}, {"prompt", "completion"} or {"messages": [{"role", "content"}]}. Throws UsageError for
/// a line that is none of these.
std::vector<int32_t> tokens_of_line(std::string_view line, const data::Tokenizer& tokenizer, const TokenizeOptions& options);

/// Makes a file of tokens from files of such lines, on several threads; a file .txt or .md is one document, which is learned as a whole.
/// Keeps finished parts in the folder `out`.parts until all are done: a second call with the same files and tokenizer resumes. Throws
/// IoError for a line that can't be used, with the file and the line's number.
Tokenized tokenize(std::span<const std::filesystem::path> inputs, const std::filesystem::path& out, const data::Tokenizer& tokenizer,
                   const TokenizeOptions& options = {});

/// Maps a file of tokens into memory. Throws IoError if it is not such a file, or not laid out as by tokenize().
class TokenFile {
 public:
  explicit TokenFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::span<const int32_t> tokens() const { return tokens_; }  // as stored: see only_read()
  std::span<const int64_t> ends() const { return ends_; }      // the number of tokens up to the end of each document
  /// One more than the largest token.
  int64_t vocabulary() const { return vocabulary_; }
  /// Whether documents are pairs: a chosen one, then the rejected one.
  bool has_pairs() const { return has_pairs_; }
  /// The checksum of the tokens; empty if another program has written the file without one.
  const std::string& checksum() const { return checksum_; }

 private:
  struct Mapping;
  std::filesystem::path path_;
  std::shared_ptr<const Mapping> mapping_;
  std::span<const int32_t> tokens_;
  std::span<const int64_t> ends_;
  int64_t vocabulary_ = 0;
  bool has_pairs_ = false;
  std::string checksum_;
};

}  // namespace tessera::llm
