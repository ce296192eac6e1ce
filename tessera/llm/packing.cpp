#include "tessera/llm/packing.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::llm {
namespace {

/// Returns the tokens at which rows of whole documents begin. The end of a document that was cut shares its row with the documents after
/// it.
std::vector<int64_t> begins_of(const TokenFile& file, int64_t length) {
  std::vector<int64_t> begins = {0};
  int64_t document = 0;  // where the present document begins
  for (const auto end : file.ends()) {
    if (end - begins.back() > length && document > begins.back()) begins.push_back(document);
    while (end - begins.back() > length) begins.push_back(begins.back() + length);
    document = end;
  }
  if (begins.back() < document) begins.push_back(document);
  return begins;
}

}  // namespace

PackedRows::PackedRows(TokenFile file, int64_t length, Packing packing) : file_(std::move(file)), length_(length) {
  if (length < 2) throw UsageError("rows of {} tokens have no next token to learn; give at least 2", length);
  rows_ = (std::ssize(file_.tokens()) + length - 1) / length;
  if (packing == Packing::Whole) begins_ = begins_of(file_, length);
}

std::string PackedRows::data() const {
  if (file_.checksum().empty()) return {};
  return fmt::format("tokens {} in rows of {}{}", file_.checksum(), length_, begins_.empty() ? "" : " of whole documents");
}

data::Samples PackedRows::operator()(std::span<const int64_t> numbers) const {
  const auto rows = std::ssize(numbers);
  data::Samples samples{.inputs = at::empty({rows, 2, length_}, at::kLong), .targets = at::empty({rows, length_}, at::kLong)};
  auto *inputs = samples.inputs.mutable_data_ptr<int64_t>(), *targets = samples.targets.mutable_data_ptr<int64_t>();
  for (const auto number : numbers) {
    fill(number, inputs, inputs + length_, targets);
    inputs += 2 * length_;
    targets += length_;
  }
  return samples;
}

void PackedRows::fill(int64_t row, int64_t* tokens, int64_t* positions, int64_t* targets) const {
  const auto stored = file_.tokens();
  const auto ends = file_.ends();
  const auto begin = begins_.empty() ? row * length_ : begins_.at(static_cast<size_t>(row));
  const auto end = begins_.empty() ? std::min(begin + length_, std::ssize(stored)) : begins_.at(static_cast<size_t>(row) + 1);
  auto document = std::ranges::upper_bound(ends, begin);
  int64_t from = begin;  // where the present document begins in this row
  for (auto at = begin; at < end; at++) {
    if (at == *document) {
      ++document;
      from = at;
    }
    const auto next = at + 1 < *document ? stored[static_cast<size_t>(at) + 1] : only_read(0);
    const auto token = token_of(stored[static_cast<size_t>(at)]);
    if (token >= file_.vocabulary())
      throw IoError("{} is damaged: its token {} is {}, but the vocabulary has {}", file_.path(), at, token, file_.vocabulary());
    *tokens++ = token;
    *positions++ = at - from;
    *targets++ = is_only_read(next) ? kIgnored : next;
  }
  const auto padding = length_ - (end - begin);
  std::fill_n(tokens, padding, 0);
  for (int64_t i = 0; i < padding; i++) positions[i] = i;  // padding is one more document
  std::fill_n(targets, padding, kIgnored);
}

void expect_vocabulary(const TokenFile& file, int64_t vocab_size) {
  if (file.vocabulary() <= vocab_size) return;
  throw ConfigError("{} has tokens of a vocabulary of {}, but the model knows only {}; make the file again with the model's own tokenizer",
                    file.path(), file.vocabulary(), vocab_size);
}

}  // namespace tessera::llm
