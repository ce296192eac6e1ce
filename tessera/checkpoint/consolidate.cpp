// One file of a whole model from the files of its ranks, one parameter at a time.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/rank_file.h"

namespace tessera::checkpoint {
namespace {

/// A tensor of the result: a parameter in parts, or what rank 0 has whole.
struct Source {
  SafetensorsEntry entry;
  std::vector<int64_t> strides = {};
  std::vector<const RankFile*> files = {};  // one for each part, in the order of the values; none if rank 0 has it whole
};

int64_t begin_of(const RankFile* file, const std::string& name) {
  return file->record.parts.at(name).begin;
}

Source source_of(const std::string& name, const std::vector<RankFile>& files) {
  Source source;
  for (const auto& file : files) {
    const auto found = file.record.parts.find(name);
    if (found == file.record.parts.end()) continue;
    const auto& part = found->second;
    if (source.files.empty()) {
      source.entry = {.name = name, .dtype = file.tensors.info(name).dtype, .sizes = part.sizes};
      source.strides = part.strides;
    }
    if (part.sizes != source.entry.sizes || part.strides != source.strides || file.tensors.info(name).dtype != source.entry.dtype) {
      throw IoError(fmt::format("the ranks' files disagree about the shape or the dtype of '{}': {} and {}", name,
                                source.files.front()->tensors.path().string(), file.tensors.path().string()));
    }
    source.files.push_back(&file);
  }
  std::ranges::stable_sort(source.files, {}, [&](const RankFile* file) { return begin_of(file, name); });
  return source;
}

at::Tensor whole(const Source& source, const RankFile& first) {
  const auto& name = source.entry.name;
  if (source.files.empty()) return first.tensors.read(name);
  const auto values = at::empty({c10::multiply_integers(source.entry.sizes)}, source.entry.dtype);
  int64_t done = 0;
  for (const auto* file : source.files) {
    const auto& part = file->record.parts.at(name);
    if (part.numel == 0 || part.begin + part.numel <= done) continue;  // of ranks that replicate each other the first will do
    if (part.begin != done) break;
    values.narrow(0, done, part.numel).copy_(file->tensors.read(name));
    done += part.numel;
  }
  if (done != values.numel()) {
    throw IoError(fmt::format("the ranks' files have only the first {} of the {} values of '{}'", done, values.numel(), name));
  }
  return values.as_strided(source.entry.sizes, source.strides);
}

}  // namespace

Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path) {
  if (std::filesystem::weakly_canonical(save_path).parent_path() == std::filesystem::weakly_canonical(folder)) {
    throw UsageError(fmt::format("{} lies in the checkpoint itself, whose files it could replace; save it elsewhere", save_path.string()));
  }
  const int ranks = saved_ranks(folder);
  std::vector<RankFile> files;
  for (int rank = 0; rank < ranks; rank++) files.push_back(open_rank_file(folder, rank, ranks));
  for (const auto& file : files) expect_same_save(files.front(), file);
  const auto& first = files.front();

  std::map<std::string, Source> sources;
  for (const auto& file : files) {
    for (const auto& [name, part] : file.record.parts) {
      if (!sources.contains(name)) sources[name] = source_of(name, files);
    }
  }
  for (const auto* names : {&first.record.whole, &first.record.buffers}) {
    for (const auto& name : *names) sources[name] = {.entry = first.tensors.info(name)};
  }
  std::vector<const Source*> order;
  for (const auto& [name, source] : sources) order.push_back(&source);
  std::ranges::stable_sort(order, std::greater{}, [](const Source* source) { return c10::elementSize(source->entry.dtype); });

  Consolidated result;
  std::vector<SafetensorsEntry> entries;
  for (const auto* source : order) entries.push_back(source->entry);
  std::map<std::string, std::string> metadata = first.record.aliases;
  metadata["format"] = "pt";
  SafetensorsWriter writer(save_path, std::move(entries), metadata);
  for (const auto* source : order) {
    const bool buffer = std::ranges::find(first.record.buffers, source->entry.name) != first.record.buffers.end();
    if (!buffer) result.parameters += c10::multiply_integers(source->entry.sizes);
    result.tensors++;
    result.bytes += source->entry.bytes();
    writer.write(whole(*source, first));
  }
  writer.close();
  return result;
}

}  // namespace tessera::checkpoint
