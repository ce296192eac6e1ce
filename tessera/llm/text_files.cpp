#include "tessera/llm/text_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/words.h"
#include "tessera/data/unicode.h"
#include "tessera/llm/chat.h"
#include "tessera/llm/lines.h"
#include "tessera/llm/token_file.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint64_t kBlock = 1 << 20;
constexpr auto kBlanks = " \t\r\n";

/// Whether a file is one document instead of lines of JSON.
bool is_text(const fs::path& path) {
  const auto kind = lower(path.extension().string());
  return kind == ".txt" || kind == ".md";
}

/// Where a text begins: behind a byte order mark.
size_t begin_of(std::string_view text) {
  return text.starts_with("\xEF\xBB\xBF") ? 3 : 0;
}

/// Whether a file is one JSON array.
bool is_array(const InputFile& file) {
  const auto begin = file.read_first(std::min<uint64_t>(file.size(), 64));
  const auto first = begin.find_first_not_of(kBlanks, begin_of(begin));
  return first != std::string::npos && begin[first] == '[';
}

/// Returns how many of the tokens of a text stand for its beginning, whose own tokens are `before`. `crosses`: whether the last of them
/// reaches over the end of the beginning.
size_t tokens_before(std::span<const int32_t> before, std::span<const int32_t> tokens, const data::Tokenizer& tokenizer, bool& crosses) {
  auto end = static_cast<size_t>(std::ranges::mismatch(before, tokens).in1 - before.begin());
  crosses = end < before.size();
  if (!crosses) return end;
  const size_t from = end > 0 ? end - 1 : 0;  // a decoder may leave out a blank at the beginning
  const auto wanted = tokenizer.decode(before.subspan(from), data::Tokenizer::Special::Shown);
  std::string text;
  // A part of a character is decoded as at most three bytes for each of its bytes.
  while (end < tokens.size() && !text.starts_with(wanted) && text.size() <= 3 * wanted.size())
    text = tokenizer.decode(tokens.subspan(from, ++end - from), data::Tokenizer::Special::Shown);
  crosses = text != wanted;
  return end;
}

/// Tokenizes the text as a whole. A token that crosses the end of a prompt is not learned, as in TRL; one that lies in two segments of a
/// template is learned if one of them is, as in transformers.
std::vector<int32_t> tokens_of(const Document& document, const data::Tokenizer& tokenizer, std::optional<int32_t> end) {
  const auto& segments = document.segments;
  const auto ends = document.by_template ? data::Ends::Bare : data::Ends::Added;
  std::string text;
  std::vector<int32_t> apart;
  std::vector<size_t> borders;
  for (const auto& segment : segments) {
    tokenizer.encode(segment.text, apart, text.empty() ? ends : data::Ends::Bare);
    text += segment.text;
    borders.push_back(apart.size());
  }
  auto tokens = segments.size() == 1 ? apart : tokenizer.encode(text, ends);
  if (tokens != apart) {
    const auto edges = tokenizer.encode("", ends);
    const auto first = static_cast<size_t>(std::ranges::mismatch(edges, tokens).in1 - edges.begin());  // behind those that begin texts
    size_t at = 0;
    for (size_t i = 0; i + 1 < segments.size(); i++) {
      const auto before = tokenizer.encode(std::string_view(text).substr(0, at += segments[i].text.size()), data::Ends::Bare);
      bool crosses = false;
      borders[i] = first + tokens_before(before, std::span(tokens).subspan(first), tokenizer, crosses);
      if (crosses && document.by_template && !segments[i].trained) borders[i]--;
    }
    borders.back() = tokens.size();
  }
  for (size_t i = 0, at = 0; i < segments.size(); at = std::max(at, borders[i++])) {
    for (auto token = at; token < borders[i] && !segments[i].trained; token++) tokens[token] = only_read(tokens[token]);
  }
  if (end && !document.by_template && (tokens.empty() || token_of(tokens.back()) != *end)) tokens.push_back(*end);
  return tokens;
}

/// The lines that begin in a part.
struct Lines {
  std::string text;
  uint64_t begin = 0;  // the place of `text` in the file
};

Lines lines_of(const InputFile& file, const Part& part) {
  // A line belongs to the part in which it begins.
  Lines lines{.text = {}, .begin = part.begin == 0 ? 0 : part.begin - 1};
  auto& text = lines.text;
  const auto fill = [&](uint64_t count) {
    const auto size = text.size();
    text.resize(size + count);
    file.read(text.data() + size, count, lines.begin + size);
  };
  fill(part.end - lines.begin);
  if (part.begin > 0 && text.find('\n') >= text.size() - 1) return {.text = {}, .begin = part.end};  // no line begins here
  while (lines.begin + text.size() < file.size() && text.back() != '\n') {
    const auto before = text.size();
    fill(std::min(kBlock, file.size() - lines.begin - before));
    if (const auto end = text.find('\n', before); end != std::string::npos) text.resize(end + 1);
  }
  if (part.begin == 0) return lines;
  const auto first = std::min(text.find('\n'), text.size() - 1) + 1;
  lines.begin += first;
  text = lines.begin < part.end ? text.substr(first) : "";
  return lines;
}

/// The number of a line that begins at a byte, counted from 1.
int64_t line_number(const InputFile& file, uint64_t byte) {
  int64_t number = 1;
  std::string block;
  for (uint64_t at = 0; at < byte; at += block.size()) {
    block.resize(std::min(kBlock, byte - at));
    file.read(block.data(), block.size(), at);
    number += std::ranges::count(block, '\n');
  }
  return number;
}

using Take = std::function<bool(std::string_view line, size_t at)>;

/// Calls `take` with each line that is not empty, and its place in the text, as far as it returns true.
void each_line(std::string_view text, const Take& take) {
  for (auto begin = begin_of(text); begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const auto line = text.substr(begin, end - begin);
    if (line.find_first_not_of(kBlanks) != std::string_view::npos && !take(line, begin)) return;
    begin = end + 1;
  }
}

/// The same with each object of a JSON array. Calls `refuse` with the place of what is something else.
void each_item(std::string_view text, const Take& take, const std::function<void(size_t at, std::string_view why)>& refuse) {
  auto at = text.find('[') + 1;
  while (at < text.size()) {
    at = std::min(text.find_first_not_of(", \t\r\n", at), text.size());
    if (at == text.size()) break;
    if (text[at] == ']') {
      at = text.find_first_not_of(kBlanks, at + 1);
      return at == std::string_view::npos ? void() : refuse(at, "there is a text behind the end of the JSON array");
    }
    if (text[at] != '{') refuse(at, "an item of the JSON array is not an object, such as {\"text\": \"...\"}");
    const auto begin = at;
    for (int depth = 0; depth > 0 || at == begin; at++) {
      if (at >= text.size()) refuse(begin, "the JSON array is cut off: this object has no end");
      if (text[at] == '"') {
        for (at++; at < text.size() && text[at] != '"'; at++) at += text[at] == '\\' ? 1 : 0;
      } else if (text[at] == '[' || text[at] == '{') {
        depth++;
      } else if (text[at] == ']' || text[at] == '}') {
        depth--;
      }
    }
    if (!take(text.substr(begin, at - begin), begin)) return;
  }
  refuse(text.size(), "the JSON array is cut off: it has no end");
}

Json object_in(std::string_view line) try {
  auto json = Json::parse(line);
  if (!json.is_object()) throw UsageError("it is JSON, but not an object, such as {\"text\": \"...\"}");
  return json;
} catch (const Json::parse_error& error) {
  if (data::invalid_utf8(line)) throw UsageError("it is not UTF-8");
  throw UsageError("it is not JSON from byte {} on, such as {{\"text\": \"...\"}}; a file that is one text must have the extension .txt or .md",
                   error.byte);
}

}  // namespace

std::vector<std::vector<int32_t>> tokens_of_line(std::string_view line, const data::Tokenizer& tokenizer, const TokenizeOptions& options) {
  std::vector<std::vector<int32_t>> tokens;
  for (const auto& document : documents_in(object_in(line), options.chat.get())) tokens.push_back(tokens_of(document, tokenizer, options.end));
  if (tokens.size() == 2 && (tokens[0].empty() || tokens[1].empty())) throw UsageError("chosen or rejected has no tokens");
  return tokens;
}

void each_document_of(const InputFile& file, const Part& part, const data::Tokenizer& tokenizer, const TokenizeOptions& options,
                      const std::function<bool(std::span<const std::vector<int32_t>>, uint64_t)>& take) {
  if (is_text(file.path())) {
    auto text = file.read_all();
    if (data::invalid_utf8(text)) throw IoError("{}: it is not UTF-8", file.path());
    text.erase(0, begin_of(text));
    const std::vector<int32_t> document[] = {tokens_of({.segments = {{.text = std::move(text)}}}, tokenizer, options.end)};
    take(document, 0);
    return;
  }
  const bool array = is_array(file);
  const auto lines = array ? Lines{.text = file.read_all()} : lines_of(file, part);
  const auto refuse = [&](size_t at, std::string_view why) {
    throw IoError("{}:{}: {}", file.path(), line_number(file, lines.begin + at), why);
  };
  const Take line = [&](std::string_view line, size_t at) {
    try {
      return take(tokens_of_line(line, tokenizer, options), lines.begin + at);
    } catch (const UsageError& error) {
      return refuse(at, error.what()), false;
    }
  };
  array ? each_item(lines.text, line, refuse) : each_line(lines.text, line);
}

std::vector<InputFile> opened_texts(std::span<const fs::path> paths, const data::Tokenizer& tokenizer, const TokenizeOptions& options) {
  std::vector<InputFile> files;
  for (const auto& path : paths) {
    if (lower(path.extension().string()) == ".parquet")
      throw UsageError(
          "{}: Parquet is not read; write it as lines: python3 -c \"import pandas; pandas.read_parquet('{}').to_json('{}', "
          "orient='records', "
          "lines=True)\"",
          path, path.string(), fs::path(path).replace_extension(".jsonl").string());
    files.emplace_back(path);
  }
  for (const auto& mark : options.chat ? options.chat->marks() : std::vector<std::string>()) {
    if (!tokenizer.find(mark))
      throw ConfigError("the tokenizer has no token {}, which the chat template writes; choose another template", mark);
  }
  return files;
}

IoError unlike_before(const InputFile& file, uint64_t at, size_t documents) {
  return IoError("{}:{}: it has {}chosen and rejected, unlike the lines before it; write two files", file.path(), line_number(file, at),
                 documents == 2 ? "" : "no ");
}

std::vector<Part> parts_of(std::span<const InputFile> files, uint64_t bytes) {
  std::vector<Part> parts;
  for (size_t i = 0; i < files.size(); i++) {
    const auto size = is_text(files[i].path()) || is_array(files[i]) ? std::max(files[i].size(), uint64_t{1}) : bytes;
    for (uint64_t begin = 0; begin < files[i].size(); begin += size) parts.push_back({i, begin, std::min(begin + size, files[i].size())});
  }
  return parts;
}

}  // namespace tessera::llm
