// Packs the documents of a file of tokens into rows of equal length.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/loader.h"
#include "tessera/llm/token_file.h"

namespace tessera::llm {

enum class Packing {
  Cut,    // documents follow each other without gaps, and are cut where a row ends
  Whole,  // a row has whole documents only, and padding after them; each goes to the open row with the least room that is enough
};

constexpr int64_t kIgnored = -100;  // the target of tokens that are not learned

/// May be used by several threads. Rows do not depend on the number of ranks, so a sampler's position is valid for any number of them.
class PackedRows {
 public:
  PackedRows(TokenFile file, int64_t length, Packing packing = Packing::Cut);

  int64_t size() const { return rows_; }

  /// Returns a text that identifies these rows, for LoaderOptions::data.
  std::string data() const;

  /// Returns for each row: inputs {3, length}, its tokens, their places in their documents (models::LlamaInput::positions), and 1, or 0 in
  /// padding (LlamaInput::counted); and targets {length}, the tokens that follow; kIgnored if the token that follows is only read or of another document, and in padding.
  data::Samples operator()(std::span<const int64_t> numbers) const;

 private:
  struct Piece {
    int64_t begin, end;  // tokens of the file
  };
  void pack();
  void fill(Piece piece, int64_t*& tokens, int64_t*& positions, int64_t*& targets) const;

  TokenFile file_;
  int64_t length_, rows_ = 0;
  std::vector<Piece> pieces_ = {};   // with Packing::Whole: documents, or parts of long ones, by row
  std::vector<size_t> begins_ = {};  // the piece with which each row begins, and where the last row ends
};

/// Throws ConfigError if a file, in which all tokens are below `vocabulary`, has tokens beyond a model's.
void expect_vocabulary(const std::filesystem::path& file, int64_t vocabulary, int64_t vocab_size);

}  // namespace tessera::llm
