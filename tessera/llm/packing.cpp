#include "tessera/llm/packing.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"

namespace tessera::llm {
namespace {

constexpr size_t kOpenRows = 64;  // how many rows wait for documents that fit

}  // namespace

PackedRows::PackedRows(TokenFile file, int64_t length, Packing packing) : file_(std::move(file)), length_(length) {
  if (length < 2) throw UsageError("rows of {} tokens have no next token to learn; give at least 2", length);
  rows_ = (std::ssize(file_.tokens()) + length - 1) / length;
  if (packing == Packing::Whole) pack();
}

/// Best fit in a window: the rows depend on the file and the length only.
void PackedRows::pack() {
  struct Row {
    int64_t room;
    std::vector<Piece> pieces;
  };
  std::vector<Row> open;
  const auto close = [&](size_t row) {
    begins_.push_back(pieces_.size());
    pieces_.insert(pieces_.end(), open[row].pieces.begin(), open[row].pieces.end());
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(row));
  };
  int64_t begin = 0;
  for (const auto document : file_.ends()) {
    for (int64_t end = 0; begin < document; begin = end) {
      end = std::min(document, begin + length_);
      auto best = open.size();
      for (size_t i = 0; i < open.size(); i++) {
        if (open[i].room >= end - begin && (best == open.size() || open[i].room < open[best].room)) best = i;
      }
      if (best == open.size()) open.push_back({length_, {}});
      open[best].room -= end - begin;
      open[best].pieces.push_back({begin, end});
      if (open[best].room == 0) close(best);
      if (open.size() > kOpenRows) close(0);
    }
  }
  while (!open.empty()) close(0);
  rows_ = std::ssize(begins_);
  begins_.push_back(pieces_.size());
}

std::string PackedRows::data() const {
  if (file_.checksum().empty()) return {};
  return fmt::format("tokens {} in rows of {}{}", file_.checksum(), length_, begins_.empty() ? "" : " of whole documents, best fit");
}

data::Samples PackedRows::operator()(std::span<const int64_t> numbers) const {
  const auto rows = std::ssize(numbers);
  data::Samples samples{.inputs = at::ones({rows, 3, length_}, at::kLong), .targets = at::empty({rows, length_}, at::kLong)};
  auto *tokens = samples.inputs.mutable_data_ptr<int64_t>(), *positions = tokens + length_,
       *targets = samples.targets.mutable_data_ptr<int64_t>();
  for (const auto number : numbers) {
    auto* const end = targets + length_;
    if (begins_.empty()) {
      fill({number * length_, std::min((number + 1) * length_, std::ssize(file_.tokens()))}, tokens, positions, targets);
    } else {
      const auto row = static_cast<size_t>(number);
      for (auto piece = begins_.at(row); piece < begins_.at(row + 1); piece++) fill(pieces_[piece], tokens, positions, targets);
    }
    const auto padding = end - targets;
    std::fill_n(tokens, padding, 0);
    std::iota(positions, positions + padding, 0);  // padding is one more document
    std::fill_n(targets, padding, kIgnored);
    std::fill_n(positions + length_, padding, 0);
    tokens += padding + 2 * length_;
    positions += padding + 2 * length_;
    targets = end;
  }
  return samples;
}

void PackedRows::fill(Piece piece, int64_t*& tokens, int64_t*& positions, int64_t*& targets) const {
  const auto stored = file_.tokens();
  auto document = std::ranges::upper_bound(file_.ends(), piece.begin);
  int64_t from = piece.begin;  // where the present document begins in this row
  for (auto at = piece.begin; at < piece.end; at++) {
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
}

void expect_vocabulary(const std::filesystem::path& file, int64_t vocabulary, int64_t vocab_size) {
  if (vocabulary <= vocab_size) return;
  throw ConfigError("{} has tokens of a vocabulary of {}, but the model knows only {}; make the file again with the model's own tokenizer",
                    file, vocabulary, vocab_size);
}

}  // namespace tessera::llm
