#include "tessera/llm/token_file.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/atomic_write.h"
#include "tessera/base/disk_memory.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/no_copy.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/data/unicode.h"
#include "tessera/llm/lines.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint64_t kPart = 4 << 20;  // bytes of a file of lines that one thread tokenizes at once
constexpr uint64_t kBlock = 1 << 20;
constexpr int kVersion = 5;  // grows when files become other tokens than before
constexpr auto kFormat = "tessera tokens", kPlan = "plan.json", kBlanks = " \t\r\n";

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

/// Whether a file begins as safetensors do: with the length of a JSON object, and this object.
bool is_safetensors(const InputFile& file) {
  if (file.size() < sizeof(uint64_t) + 1) return false;
  const auto begin = file.read_first(sizeof(uint64_t) + 1);
  uint64_t length = 0;
  std::memcpy(&length, begin.data(), sizeof length);
  return begin.back() == '{' && length <= file.size() - sizeof length;
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

/// A range of bytes of a file of lines, and the lines that begin in it. A text file is one part, and a JSON array, too.
struct Part {
  size_t file = 0;
  uint64_t begin = 0, end = 0;
};

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

/// The documents of a part.
struct Documents {
  std::vector<int32_t> tokens;
  std::vector<int64_t> ends;
  std::array<int64_t, 2> first = {-1, -1};  // the bytes at which the first single document and the first pair begin
};

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

/// Opens files of texts. Throws for those that are not read, and unless each mark of the template is one token.
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

/// The error of a line that has a pair behind one without, or the other way round.
IoError unlike_before(const InputFile& file, uint64_t at, size_t documents) {
  return IoError("{}:{}: it has {}chosen and rejected, unlike the lines before it; write two files", file.path(), line_number(file, at),
                 documents == 2 ? "" : "no ");
}

Documents documents_of(const InputFile& file, const Part& part, const data::Tokenizer& tokenizer, const TokenizeOptions& options) {
  Documents result;
  each_document_of(file, part, tokenizer, options, [&](std::span<const std::vector<int32_t>> documents, uint64_t at) {
    if (auto& first = result.first.at(documents.size() - 1); first < 0) first = static_cast<int64_t>(at);
    for (const auto& tokens : documents) {
      result.tokens.insert(result.tokens.end(), tokens.begin(), tokens.end());
      if (!tokens.empty()) result.ends.push_back(std::ssize(result.tokens));
    }
    return true;
  });
  return result;
}

/// Writes the documents of a finished part to a file.
void keep(const Documents& documents, const fs::path& path) {
  const int64_t counts[] = {std::ssize(documents.ends), std::ssize(documents.tokens), documents.first[0], documents.first[1]};
  NewFile file(path);
  file.write(std::as_bytes(std::span(counts)));
  file.write(std::as_bytes(std::span(documents.ends)));
  file.write(std::as_bytes(std::span(documents.tokens)));
  file.commit();
}

Documents kept(const fs::path& path) {
  const InputFile file(path);
  int64_t counts[4] = {};
  file.read(counts, sizeof counts, 0);
  Documents documents;
  documents.first = {counts[2], counts[3]};
  documents.ends.resize(static_cast<size_t>(counts[0]));
  documents.tokens.resize(static_cast<size_t>(counts[1]));
  const auto bytes_of_ends = documents.ends.size() * sizeof(int64_t);
  file.read(documents.ends.data(), bytes_of_ends, sizeof counts);
  file.read(documents.tokens.data(), documents.tokens.size() * sizeof(int32_t), sizeof counts + bytes_of_ends);
  return documents;
}

/// Describes the files and the settings. The finished parts of an earlier call are used only if this text was the same.
std::string plan_of(std::span<const fs::path> inputs, const data::Tokenizer& tokenizer, const TokenizeOptions& options) {
  Json plan = {{"files", Json::array()},
               {"version", kVersion},
               {"part", kPart},
               {"chat", options.chat ? options.chat->description() : ""},
               {"end", options.end.value_or(-1)}};
  for (const auto& input : inputs)
    plan["files"].push_back({fs::absolute(input).string(), fs::file_size(input), fs::last_write_time(input).time_since_epoch().count()});
  checkpoint::Checksum digest;
  const auto description = tokenizer.json();
  digest.add(std::as_bytes(std::span(description)));
  plan["tokens"] = checkpoint::Checksum::text(digest.value());
  return plan.dump(2) + "\n";
}

/// Throws UsageError if the output would replace an input, or a file that is not a file of tokens.
void expect_place(const fs::path& out, std::span<const fs::path> inputs) {
  if (!is_there(out)) return;
  for (const auto& input : inputs) {
    if (fs::equivalent(input, out)) throw UsageError("{} is an input, which the output would replace; write elsewhere", out);
  }
  try {
    TokenFile{out};
  } catch (const IoError&) {
    throw UsageError("{} is there already, and is not a file of tokens; write elsewhere, or remove it", out);
  }
}

/// Returns the folder of finished parts. Removes the parts if they were made of other files or with other settings.
fs::path folder_of_parts(const fs::path& out, const std::string& plan) {
  auto folder = out;
  folder += ".parts";
  const auto file = folder / kPlan;
  if (is_there(file) && InputFile(file).read_all() == plan) return folder;
  if (is_there(folder)) {
    if (!is_there(file)) throw UsageError("{} is there, but has no finished parts of an earlier call; remove it", folder);
    remove_tree(folder);
  }
  make_folder(folder);
  write_text(file, plan);
  return folder;
}

std::vector<Part> parts_of(std::span<const InputFile> files) {
  std::vector<Part> parts;
  for (size_t i = 0; i < files.size(); i++) {
    const auto size = is_text(files[i].path()) || is_array(files[i]) ? std::max(files[i].size(), uint64_t{1}) : kPart;
    for (uint64_t begin = 0; begin < files[i].size(); begin += size) parts.push_back({i, begin, std::min(begin + size, files[i].size())});
  }
  return parts;
}

/// Runs act(0), ..., act(count - 1) on several threads. When all have ended, throws the error of the failed call with the lowest number.
void on_threads(int threads, size_t count, const std::function<void(size_t)>& act) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::pair<size_t, std::exception_ptr> first = {count, nullptr};
  const auto work = [&] {
    for (size_t i = 0; (i = next++) < count;) {
      try {
        act(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < first.first) first = {i, std::current_exception()};
        next = count;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    for (int i = 1; i < threads; i++) others.emplace_back(work);
    work();
  }
  if (first.second) std::rethrow_exception(first.second);
}

at::Tensor tensor_of(const auto& values, at::ScalarType dtype) {
  return at::from_blob(const_cast<void*>(static_cast<const void*>(values.data())), {std::ssize(values)}, at::TensorOptions().dtype(dtype));
}

/// Joins the parts to one file. Throws IoError if some lines are pairs and others are not.
Tokenized join(const fs::path& folder, const std::vector<InputFile>& files, std::span<const Part> parts, const fs::path& out,
               int64_t vocabulary) {
  Tokenized result;
  bool seen[2] = {};
  for (size_t i = 0; i < parts.size(); i++) {
    const auto documents = kept(folder / std::to_string(i));
    for (const bool pair : {false, true}) {
      const auto first = documents.first.at(pair), other = documents.first.at(!pair);
      if (first >= 0 && (seen[!pair] || (other >= 0 && other < first)))
        throw unlike_before(files[parts[i].file], static_cast<uint64_t>(first), pair ? 2 : 1);
      seen[pair] |= first >= 0;
    }
    result.documents += std::ssize(documents.ends);
    result.tokens += std::ssize(documents.tokens);
    result.trained += std::ranges::count_if(documents.tokens, [](int32_t token) { return !is_only_read(token); });
  }
  if (result.documents == 0) throw IoError("there are no documents to write to {}; give files that are not empty", out);
  std::map<std::string, std::string> metadata = {{"format", kFormat}, {"vocabulary", std::to_string(vocabulary)}};
  if (seen[true]) metadata["pairs"] = "1";
  checkpoint::SafetensorsWriter writer(
      out,
      {{.name = "ends", .dtype = at::kLong, .sizes = {result.documents}}, {.name = "tokens", .dtype = at::kInt, .sizes = {result.tokens}}},
      metadata);
  for (int64_t before = 0; const bool of_ends : {true, false}) {
    for (size_t i = 0; i < parts.size(); i++) {
      auto documents = kept(folder / std::to_string(i));
      for (auto& end : documents.ends) end += before;
      before += of_ends ? std::ssize(documents.tokens) : 0;
      if (of_ends && !documents.ends.empty()) writer.append(tensor_of(documents.ends, at::kLong));
      if (!of_ends && !documents.tokens.empty()) writer.append(tensor_of(documents.tokens, at::kInt));
    }
  }
  writer.close();
  return result;
}

checkpoint::SafetensorsFile opened(const fs::path& path) {
  try {
    return checkpoint::SafetensorsFile(path);
  } catch (const IoError& error) {
    throw IoError("{}; tessera data tokenize makes a file of tokens from texts", error.what());
  }
}

}  // namespace

std::vector<std::vector<int32_t>> tokens_of_line(std::string_view line, const data::Tokenizer& tokenizer, const TokenizeOptions& options) {
  const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    throw UsageError(
        data::invalid_utf8(line)
            ? "it is not UTF-8"
            : "it is not a JSON object, such as {\"text\": \"...\"}; a file that is one text must have the extension .txt or .md");
  std::vector<std::vector<int32_t>> tokens;
  for (const auto& document : documents_in(json, options.chat.get())) tokens.push_back(tokens_of(document, tokenizer, options.end));
  if (tokens.size() == 2 && (tokens[0].empty() || tokens[1].empty())) throw UsageError("chosen or rejected has no tokens");
  return tokens;
}

void each_document(const fs::path& path, const data::Tokenizer& tokenizer, const TokenizeOptions& options,
                   const std::function<bool(std::span<const int32_t>)>& take) {
  const auto files = opened_texts({&path, 1}, tokenizer, options);
  if (is_safetensors(files.front())) {
    const TokenFile tokens(path);
    for (size_t i = 0, begin = 0; i < tokens.ends().size(); begin = static_cast<size_t>(tokens.ends()[i++])) {
      if (!take(tokens.tokens().subspan(begin, static_cast<size_t>(tokens.ends()[i]) - begin))) return;
    }
    return;
  }
  size_t alike = 0;
  bool more = true;
  for (const auto& part : parts_of(files)) {
    if (!more) return;
    each_document_of(files.front(), part, tokenizer, options, [&](std::span<const std::vector<int32_t>> documents, uint64_t at) {
      if (alike > 0 && documents.size() != alike) throw unlike_before(files.front(), at, documents.size());
      alike = documents.size();
      for (const auto& tokens : documents) more = more && (tokens.empty() || take(tokens));
      return more;
    });
  }
}

Tokenized tokenize(std::span<const fs::path> inputs, const fs::path& out, const data::Tokenizer& tokenizer,
                   const TokenizeOptions& options) {
  const auto files = opened_texts(inputs, tokenizer, options);
  expect_place(out, inputs);
  const auto folder = folder_of_parts(out, plan_of(inputs, tokenizer, options));
  const auto parts = parts_of(files);
  uint64_t all = 0;
  for (const auto& file : files) all += file.size();
  std::atomic<int64_t> found = 0;
  std::mutex mutex;
  uint64_t done = 0;
  const auto threads = options.threads > 0 ? options.threads : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  on_threads(threads, parts.size(), [&](size_t i) {
    const auto path = folder / std::to_string(i);
    if (is_there(path)) {
      found++;
    } else {
      keep(documents_of(files[parts[i].file], parts[i], tokenizer, options), path);
    }
    const std::lock_guard lock(mutex);
    done += parts[i].end - parts[i].begin;
    if (options.progress && !options.progress(done, all)) throw Error("it was stopped; the same call resumes from here");
  });
  auto result = join(folder, files, parts, out, tokenizer.size());
  result.found = found;
  remove_tree(folder);
  return result;
}

struct TokenFile::Mapping : NoCopy {
  Mapping(const fs::path& path, uint64_t size) : size(size) {
    if (object_path(path)) {
      copy = allocate_on_disk(size, {}, path.native());
      InputFile(path).read(data = copy.get(), size, 0);
      return;
    }
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw IoError("can't open {}: {}", path, std::strerror(errno));
    data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED) throw IoError("can't map {} into memory: {}", path, std::strerror(errno));
  }
  ~Mapping() {
    if (!copy) ::munmap(data, size);
  }

  at::DataPtr copy;  // of an object in a store
  void* data;
  uint64_t size;
};

TokenFile::TokenFile(const fs::path& path) : path_(path) {
  const auto file = opened(path);
  const auto format = file.metadata().find("format"), vocabulary = file.metadata().find("vocabulary");
  const auto unlike = [&](const std::string& why) {
    return IoError("{} is damaged, or was not made by tessera data tokenize: {}", path, why);
  };
  if (format == file.metadata().end() || format->second != kFormat || !file.contains("tokens") || !file.contains("ends"))
    throw IoError("{} is not a file of tokens; tessera data tokenize makes one", path);
  if (file.info("tokens").dtype != at::kInt || file.info("ends").dtype != at::kLong) {
    throw unlike(fmt::format("'tokens' are {} and 'ends' are {}, but must be Int and Long", c10::toString(file.info("tokens").dtype),
                             c10::toString(file.info("ends").dtype)));
  }
  if (vocabulary == file.metadata().end()) throw unlike("its metadata have no 'vocabulary', which is one more than the largest token");
  mapping_ = std::make_shared<Mapping>(path, file.file().size());
  const auto* bytes = static_cast<const char*>(mapping_->data);
  tokens_ = {reinterpret_cast<const int32_t*>(bytes + file.offset("tokens")),
             static_cast<size_t>(file.info("tokens").bytes()) / sizeof(int32_t)};
  ends_ = {reinterpret_cast<const int64_t*>(bytes + file.offset("ends")), static_cast<size_t>(file.info("ends").bytes()) / sizeof(int64_t)};
  vocabulary_ = std::strtoll(vocabulary->second.c_str(), nullptr, 10);
  const auto pairs = file.metadata().find("pairs");
  pairs_ = pairs != file.metadata().end() && pairs->second == "1";
  if (pairs_ && ends_.size() % 2 != 0) throw unlike(fmt::format("it has pairs, but {} documents", ends_.size()));
  checksum_ = file.checksum("tokens");
  int64_t before = 0;
  for (const auto end : ends_) {
    if (end <= before || end > std::ssize(tokens_)) {
      throw unlike(
          fmt::format("a document ends at token {} of {}, and the one before it at {}; 'ends' must grow, because no document is empty", end,
                      tokens_.size(), before));
    }
    before = end;
  }
  if (before != std::ssize(tokens_)) throw unlike(fmt::format("its last document ends at token {} of {}", before, tokens_.size()));
}

}  // namespace tessera::llm
