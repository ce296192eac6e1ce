#include "tessera/checkpoint/formats/torch_xla/rank.h"

#include <fmt/format.h>
#include <glob.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/formats/torch_xla/names.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
namespace xla = torch_xla;
using pickle::Dict;
using pickle::Value;

std::vector<fs::path> files_like(const fs::path& pattern) {
  struct Found : glob_t {
    Found() : glob_t{} {}
    Found(const Found&) = delete;
    Found& operator=(const Found&) = delete;
    ~Found() { ::globfree(this); }
  } found;
  const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
  if (status != 0 && status != GLOB_NOMATCH) throw IoError("can't look for the files {}", pattern);
  return {found.gl_pathv, found.gl_pathv + found.gl_pathc};
}

}  // namespace

namespace torch_xla {

bool is_of_shard(const std::string& name) {
  return name.starts_with(xla::kShard) || name.find("." + std::string(xla::kShard)) != std::string::npos;
}

RankContent::RankContent(const fs::path& path) : fail{path.string() + " "}, path_(path), archive_(InputFile(path)) {
  if (content().as<Dict>() == nullptr) fail("holds {} instead of a dict", content().kind());
  if (content().as<Dict>()->find(xla::kMetadata) == nullptr) {
    if (has_whole_model()) return;
    fail("has no 'shard_metadata', which says how parameters are divided into shards; save get_shard_metadata() with the model");
  }
  rank_ = integer("rank");
  ranks_ = integer("world_size");
  const auto named = rank_in_name(path.filename().string(), path.extension().string());
  if (named && (named->first != rank_ || named->second != ranks_))
    fail("was written by rank {} of {}; somebody has renamed it", rank_, ranks_);
  for (const auto& [key, value] : dict(content(), xla::kModel).entries()) {
    const auto name = to_name(key);
    if (!name || !tensors_.emplace(*name, &value).second) fail("has a model with a key that is not a name, or that occurs twice");
    names_.push_back(*name);
  }
}

const Value& RankContent::dict(const Value& outer, std::string_view key) const {
  const auto& found = outer[key];
  if (found.as<Dict>() == nullptr) fail("has no dict '{}'", key);
  return found;
}

const Value* RankContent::value(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second;
}

ArchivedTensor RankContent::tensor(const std::string& name) const {
  const auto* const found = value(name);
  const auto result = found == nullptr ? std::nullopt : archive_.tensor(*found, name);
  if (!result) fail("has no tensor '{}', which rank 0's shard_info lists", name);
  return *result;
}

bool RankContent::has_whole_model() const {
  const auto* const model = content()[xla::kModel].as<Dict>();
  return model != nullptr && std::ranges::none_of(model->entries, [](const auto& entry) {
           const auto name = to_name(entry.first);
           return name && is_of_shard(*name);
         });
}

int64_t RankContent::integer(std::string_view key) const {
  const auto* const result = metadata()[key].as<int64_t>();
  if (result == nullptr || *result < 0 || *result > INT32_MAX || (*result == 0 && key == "world_size"))
    fail("has a shard_metadata without a '{}', or with one that is out of range", key);
  return *result;
}

std::vector<RankContent> open_all(const fs::path& path) {
  const auto paths = torch_xla_files(path);
  std::vector<RankContent> files;
  for (const auto& each : paths) {
    files.emplace_back(each);
    if (files.back().is_whole()) files.pop_back();
  }
  if (files.empty()) throw IoError("there are no rank files of torch_xla at {}", path);
  std::ranges::stable_sort(files, {}, &RankContent::rank);
  const auto ranks = files.front().ranks();
  for (const auto& file : files) {
    if (file.ranks() == ranks) continue;
    throw IoError("{} is of {} ranks and {} of {}: these are files of two checkpoints", files.front().path(), ranks, file.path(),
                  file.ranks());
  }
  for (size_t i = 0; i < files.size(); i++) {
    const auto& file = files[i];
    if (i > 0 && file.rank() == files[i - 1].rank()) {
      throw IoError("{} and {} are both of rank {}; somebody has copied one", files[i - 1].path(), file.path(), file.rank());
    }
    if (file.rank() >= ranks) file.fail("says that it is of rank {} of {}", file.rank(), ranks);
  }
  for (int64_t rank = 0; rank < ranks; rank++) {
    if (static_cast<size_t>(rank) < files.size() && files[static_cast<size_t>(rank)].rank() == rank) continue;
    throw IoError("{} is of {} ranks, but the file of rank {} is missing{}", files.front().path(), ranks, rank,
                  paths.size() == 1 ? "; give the prefix of all of them, or a pattern with *" : "");
  }
  return files;
}

}  // namespace torch_xla

std::vector<fs::path> torch_xla_files(const fs::path& path) {
  const auto name = path.filename().string();
  const auto of_file = rank_in_name(name, path.extension().string());
  if (is_there(path) && !fs::is_directory(path) && !of_file) return {path};
  if (!is_there(path) && name.find_first_of("*?[") != std::string::npos) return files_like(path);
  const auto start = of_file ? name.substr(0, name.rfind("rank-")) : name + "_";
  const auto extension = of_file ? path.extension().string() : xla::kExtension;
  std::vector<fs::path> result;
  const auto parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  for (const auto& each : names_in(parent).value_or(std::vector<std::string>())) {
    const auto ranks = rank_in_name(each, extension);
    const bool is_of_prefix = ranks && each.starts_with(start) && each.rfind("rank-") == start.size();
    if (is_of_prefix && (!of_file || of_file->second == ranks->second)) result.push_back(path.parent_path() / each);
  }
  return result;
}

bool is_torch_xla_file(const fs::path& path) {
  return !TorchArchive(InputFile(path)).content()[xla::kMetadata]["shard_info"].is_none();
}

}  // namespace tessera::checkpoint
