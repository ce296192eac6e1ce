// Pairs of sentences that mean the same or do not, in files like those of the Microsoft Research Paraphrase Corpus (MRPC).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/loader.h"
#include "tessera/data/samples.h"
#include "tessera/data/wordpiece.h"

namespace tessera::data {

struct SentencePairs {
  std::vector<std::pair<std::string, std::string>> sentences;
  std::vector<int64_t> labels;  // 1 where both sentences mean the same, else 0

  int64_t size() const { return static_cast<int64_t>(sentences.size()); }
  bool operator==(const SentencePairs&) const = default;
};

/// Reads a file of tab-separated columns, with a header line that names "Quality", "#1 String" and "#2 String"; other columns are ignored.
/// Quotes are characters like all others. Throws IoError, with file and line, for a line that has another form or is not UTF-8.
SentencePairs read_sentence_pairs(const std::filesystem::path& file);

/// Reads train.tsv of the folder, or dev.tsv for Split::Test: GLUE's own test.tsv has no labels.
SentencePairs read_sentence_pairs(const std::filesystem::path& folder, Split split);

/// Writes a file that read_sentence_pairs() reads, with the columns of MRPC. Throws UsageError for sentences with tabs or line breaks.
void write_sentence_pairs(const std::filesystem::path& file, const SentencePairs& pairs);

/// Returns a hash of all pairs as text, for LoaderOptions::data.
std::string fingerprint(const SentencePairs& pairs);

/// Returns a function that makes batches of pairs: tokens, mask and types as {pairs, 3, length}, with the labels as targets. The pairs and
/// the tokenizer must outlive it.
Fetch fetch_pairs(const SentencePairs& pairs, const WordPiece& tokenizer, int64_t max_length);

struct FakeSentencePairs {
  int64_t count = 2000;
  Split split = Split::Train;
  uint64_t seed = 0;
};

/// Generates pairs for trying a program without a data set: sentences of one subject mean the same, sentences of two subjects do not. The
/// same options give the same pairs on every machine.
SentencePairs fake_sentence_pairs(const FakeSentencePairs& options = {});

}  // namespace tessera::data
