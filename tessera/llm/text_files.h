// Reads the documents of files of texts: of lines of JSON, of one JSON array, or of a text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/llm/tokenize.h"

namespace tessera::llm {

/// Opens files. Throws for those that are not read, and unless each mark of the template is one token.
std::vector<InputFile> opened_texts(std::span<const std::filesystem::path> paths, const data::Tokenizer& tokenizer,
                                    const TokenizeOptions& options);

/// A range of bytes of a file of lines, and the lines that begin in it. A text file is one part, and a JSON array, too.
struct Part {
  size_t file = 0;
  uint64_t begin = 0, end = 0;
};

std::vector<Part> parts_of(std::span<const InputFile> files, uint64_t bytes);

/// Calls `take` with the tokens of each document that begins in a part, or of both documents of a pair, and the place of its line, as far
/// as it returns true. Throws IoError that names the line.
void each_document_of(const InputFile& file, const Part& part, const data::Tokenizer& tokenizer, const TokenizeOptions& options,
                      const std::function<bool(std::span<const std::vector<int32_t>>, uint64_t at)>& take);

/// The error of a line that has a pair behind one without, or the other way round.
IoError unlike_before(const InputFile& file, uint64_t at, size_t documents);

}  // namespace tessera::llm
