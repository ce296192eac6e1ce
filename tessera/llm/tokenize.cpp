#include "tessera/llm/tokenize.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/llm/chat.h"
#include "tessera/llm/text_files.h"
#include "tessera/llm/token_file.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint64_t kPart = 4 << 20;  // bytes of a file of lines that one thread tokenizes at once
constexpr int kVersion = 5;          // grows when files become other tokens than before
constexpr auto kPlan = "plan.json";

/// Whether a file begins as safetensors do: with the length of a JSON object, and this object.
bool is_safetensors(const InputFile& file) {
  if (file.size() < sizeof(uint64_t) + 1) return false;
  const auto begin = file.read_first(sizeof(uint64_t) + 1);
  uint64_t length = 0;
  std::memcpy(&length, begin.data(), sizeof length);
  return begin.back() == '{' && length <= file.size() - sizeof length;
}

/// The documents of a part.
struct Documents {
  std::vector<int32_t> tokens;
  std::vector<int64_t> ends;
  std::array<int64_t, 2> first = {-1, -1};  // the bytes at which the first single document and the first pair begin
};

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
  std::map<std::string, std::string> metadata = {{"format", TokenFile::kFormat}, {"vocabulary", std::to_string(vocabulary)}};
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

}  // namespace

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
  for (const auto& part : parts_of(files, kPart)) {
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
  const auto parts = parts_of(files, kPart);
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

}  // namespace tessera::llm
