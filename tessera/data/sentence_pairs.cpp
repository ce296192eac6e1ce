#include "tessera/data/sentence_pairs.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <random>
#include <string_view>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/data/unicode.h"

namespace tessera::data {
namespace {

constexpr std::string_view kLabel = "Quality", kFirst = "#1 String", kSecond = "#2 String";
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

std::vector<std::string_view> split(std::string_view line) {
  std::vector<std::string_view> fields;
  for (size_t end = 0; end != std::string_view::npos;) {
    end = line.find('\t');
    fields.push_back(line.substr(0, end));
    if (end != std::string_view::npos) line.remove_prefix(end + 1);
  }
  return fields;
}

/// The lines of a file, with their numbers.
class Lines {
 public:
  explicit Lines(const std::filesystem::path& file) : path_(file), text_(InputFile(file).read_all()), rest_(text_) {
    if (rest_.starts_with(kByteOrderMark)) rest_.remove_prefix(kByteOrderMark.size());
  }

  /// Goes to the next line, unless there is none.
  bool next() {
    if (rest_.empty()) return false;
    const auto end = rest_.find('\n');
    line_ = rest_.substr(0, end);
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 1);
    if (line_.ends_with('\r')) line_.remove_suffix(1);
    number_++;
    if (const auto byte = invalid_utf8(line_)) refuse(fmt::format("byte {} of the line is not UTF-8", *byte + 1));
    return true;
  }
  std::vector<std::string_view> fields() const { return split(line_); }

  [[noreturn]] void refuse(const std::string& why) const { throw IoError("{}:{}: {}", path_, number_, printable(why)); }

 private:
  std::filesystem::path path_;
  std::string text_;
  std::string_view rest_, line_;
  int64_t number_ = 0;
};

size_t column(const Lines& header, std::string_view name) {
  const auto names = header.fields();
  const auto found = std::ranges::find(names, name);
  if (found != names.end()) return static_cast<size_t>(found - names.begin());
  header.refuse(fmt::format("the header has no column '{}', but '{}'; it must have the columns '{}', '{}' and '{}', separated by tabs",
                            name, fmt::join(names, "', '"), kLabel, kFirst, kSecond));
}

}  // namespace

SentencePairs read_sentence_pairs(const std::filesystem::path& file) {
  Lines lines(file);
  if (!lines.next()) throw IoError("{} is empty", file);
  const auto columns = lines.fields().size();
  const auto label = column(lines, kLabel), first = column(lines, kFirst), second = column(lines, kSecond);
  SentencePairs pairs;
  while (lines.next()) {
    const auto fields = lines.fields();
    if (fields.size() != columns) lines.refuse(fmt::format("{}, but the header has {}", counted(std::ssize(fields), "column"), columns));
    if (fields[label] != "0" && fields[label] != "1")
      lines.refuse(fmt::format("{} is '{}', but must be 0, or 1 for sentences that mean the same", kLabel, fields[label]));
    pairs.labels.push_back(fields[label] == "1" ? 1 : 0);
    pairs.sentences.emplace_back(fields[first], fields[second]);
  }
  if (pairs.size() == 0) throw IoError("{} has a header and no pairs of sentences", file);
  return pairs;
}

SentencePairs read_sentence_pairs(const std::filesystem::path& folder, Split split) {
  const auto file = folder / (split == Split::Train ? "train.tsv" : "dev.tsv");
  if (is_there(file)) return read_sentence_pairs(file);
  throw IoError("the folder {} {}; it must have train.tsv and dev.tsv, as MRPC in GLUE has them", folder,
                is_there(folder) ? fmt::format("has no {}", file.filename().string()) : "does not exist");
}

void write_sentence_pairs(const std::filesystem::path& file, const SentencePairs& pairs) {
  std::string text = fmt::format("{}\t#1 ID\t#2 ID\t{}\t{}\n", kLabel, kFirst, kSecond);
  for (size_t i = 0; i < pairs.sentences.size(); i++) {
    const auto& [first, second] = pairs.sentences[i];
    if ((first + second).find_first_of("\t\n\r") != std::string::npos)
      throw UsageError("pair {} has a tab or a line break, which a file of tab-separated columns can't hold; remove it", i);
    text += fmt::format("{}\t{}\t{}\t{}\t{}\n", pairs.labels.at(i), 2 * i, 2 * i + 1, first, second);
  }
  write_text(file, text);
}

std::string fingerprint(const SentencePairs& pairs) {
  std::string text;
  for (const auto& [first, second] : pairs.sentences) text += first + '\t' + second + '\n';
  return fingerprint(Samples{.inputs = at::from_blob(text.data(), {std::ssize(text)}, at::kByte), .targets = at::tensor(pairs.labels)});
}

Fetch fetch_pairs(const SentencePairs& pairs, const WordPiece& tokenizer, int64_t max_length) {
  return [&pairs, &tokenizer, max_length](std::span<const int64_t> numbers) {
    SentencePairs chosen;
    for (const auto number : numbers) {
      chosen.sentences.push_back(pairs.sentences.at(static_cast<size_t>(number)));
      chosen.labels.push_back(pairs.labels.at(static_cast<size_t>(number)));
    }
    const auto encoded = tokenizer.encode(chosen.sentences, {.max_length = max_length});
    return Samples{.inputs = at::stack({encoded.tokens, encoded.mask, encoded.types}, 1), .targets = at::tensor(chosen.labels)};
  };
}

SentencePairs fake_sentence_pairs(const FakeSentencePairs& options) {
  if (options.count < 0) throw UsageError("{} pairs of sentences can't be made", options.count);
  constexpr size_t kWords = 5;  // words in a sentence: more than half of its subject's words, so that two sentences of a subject share some
  using Words = std::array<std::string_view, 8>;
  static constexpr std::array<Words, 4> kSubjects = {
      Words{"sails", "harbour", "waves", "anchor", "sailors", "tide", "lighthouse", "fog"},
      Words{"flour", "oven", "baker", "crust", "dough", "butter", "cr\u00e8me", "sugar"},
      Words{"violin", "concert", "strings", "cello", "rehearsal", "applause", "orchestra", "encore"},
      Words{"glacier", "summit", "ropes", "climbers", "ridge", "avalanche", "snow", "igloo"},
  };
  static constexpr std::array<std::string_view, 4> kOpenings = {"Today:", "\"News", "Again", "More"};
  // Uses no distribution of the standard library, because their results differ between standard libraries.
  std::mt19937_64 random(options.seed * 2 + (options.split == Split::Train ? 1 : 2));
  const auto draw = [&](size_t below) { return static_cast<size_t>(random() % below); };
  const auto sentence = [&](Words subject) {
    std::string text(kOpenings[draw(kOpenings.size())]);
    for (size_t i = 0; i < kWords; i++) {
      std::swap(subject[i], subject[i + draw(subject.size() - i)]);
      text += fmt::format(" {}", subject[i]);
    }
    return text;
  };
  SentencePairs pairs;
  for (int64_t i = 0; i < options.count; i++) {
    const bool same = draw(2) == 1;
    const auto first = draw(kSubjects.size());
    const auto second = same ? first : (first + 1 + draw(kSubjects.size() - 1)) % kSubjects.size();
    auto before = sentence(kSubjects[first]);
    pairs.sentences.emplace_back(std::move(before), sentence(kSubjects[second]));
    pairs.labels.push_back(same ? 1 : 0);
  }
  return pairs;
}

}  // namespace tessera::data
