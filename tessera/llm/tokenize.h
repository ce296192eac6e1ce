// Makes files of tokens from files of texts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/data/tokenizer.h"

namespace tessera::llm {

class ChatTemplate;  // chat.h

struct TokenizeOptions {
  std::shared_ptr<const ChatTemplate> chat = {};  // for conversations
  std::optional<int32_t> end = {};                // the token after each document, unless the template ends it with its own
  int threads = 0;                                // 0: as many as there are cores
  /// Called with the number of bytes that are tokenized so far, and the number of bytes of all files. Return false to stop: finished parts
  /// stay for the next call.
  std::function<bool(uint64_t done, uint64_t all)> progress = {};
};

struct Tokenized {
  int64_t documents = 0, tokens = 0, trained = 0;
  int64_t found = 0;  // parts that an earlier call had finished already
};

/// Returns the tokens of an object of JSON: of {"text"}, {"prompt", "completion"}, {"messages": [{"role", "content"}]} or another form of
/// lines.h one document, of {"prompt", "chosen", "rejected"} two. Throws UsageError for an object that is none of these.
std::vector<std::vector<int32_t>> tokens_of_line(std::string_view line, const data::Tokenizer& tokenizer, const TokenizeOptions& options);
/// Calls `take` with the documents of a file of such objects, of a text or of tokens, as far as it returns true.
void each_document(const std::filesystem::path& path, const data::Tokenizer& tokenizer, const TokenizeOptions& options,
                   const std::function<bool(std::span<const int32_t>)>& take);

/// Makes a file of tokens from files of such lines, or of one JSON array of them, on several threads; a file .txt or .md is one document,
/// which is learned as a whole.
/// Keeps finished parts in the folder `out`.parts until all are done: a second call with the same files and tokenizer resumes. Throws
/// IoError for a line that can't be used, with the file and the line's number.
Tokenized tokenize(std::span<const std::filesystem::path> inputs, const std::filesystem::path& out, const data::Tokenizer& tokenizer,
                   const TokenizeOptions& options = {});

}  // namespace tessera::llm
