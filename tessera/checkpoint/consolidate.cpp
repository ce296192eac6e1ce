#include "tessera/checkpoint/consolidate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/rank_file.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

/// A tensor of the result, and the files from which it is read.
struct Source {
  SafetensorsEntry entry;
  std::vector<const RankFile*> files = {};  // files with parts of it; empty if rank 0's file has all of it
};

Source source_of(const std::string& name, const std::vector<RankFile>& files) {
  Source source;
  for (const auto& file : files) {
    const auto found = file.record.parts.find(name);
    if (found == file.record.parts.end()) continue;
    const auto& part = found->second;
    const auto dtype = file.tensors.info(name).dtype;
    if (source.files.empty()) source.entry = {.name = name, .dtype = dtype, .sizes = part.shape};
    if (part.shape != source.entry.sizes || dtype != source.entry.dtype) {
      throw IoError(fmt::format("the ranks' files disagree about the shape or the dtype of '{}': {} and {}", name,
                                source.files.front()->tensors.path().string(), file.tensors.path().string()));
    }
    source.files.push_back(&file);
  }
  return source;
}

std::vector<TensorSlice> without(std::vector<TensorSlice> missing, const std::vector<TensorSlice>& found) {
  for (const auto& slice : found) {
    std::vector<TensorSlice> rest;
    for (const auto& part : missing) std::ranges::move(difference(part, slice), std::back_inserter(rest));
    missing = std::move(rest);
  }
  return missing;
}

/// The files that together have all values. Throws IoError if there are none: before memory is asked for, because the files may promise a
/// shape for which no memory is enough.
std::vector<const RankFile*> needed_files(const Source& source) {
  const auto& [name, dtype, shape] = source.entry;
  if (source.files.empty()) return {};  // rank 0's file has all of it
  std::vector<const RankFile*> needed;
  auto missing = std::vector{whole_slice(shape)};
  for (const auto* file : source.files) {
    auto rest = without(missing, file->record.parts.at(name).slices);
    if (rest == missing) continue;  // the part is empty, or an earlier rank has the same values (a replica)
    missing = std::move(rest);
    needed.push_back(file);
  }
  if (missing.empty() || missing.front().numel() == 0) return needed;
  const auto gap = std::ranges::min(missing, {}, &TensorSlice::offsets);
  throw IoError(fmt::format("the ranks' files have not all values of '{}': the first that is missing is at [{}]", name,
                            fmt::join(gap.offsets, ", ")));
}

at::Tensor whole(const Source& source, std::span<const RankFile* const> needed, const RankFile& first) {
  const auto& [name, dtype, shape] = source.entry;
  if (source.files.empty()) return first.tensors.read(name);
  const auto values = at::empty(shape, dtype);
  for (const auto* file : needed) {
    const auto& part = file->record.parts.at(name);
    const auto views = views_of_slices(file->tensors.read(name), part.slices, part.strides);
    for (size_t i = 0; i < views.size(); i++) view_of(values, part.slices[i]).copy_(views[i]);
  }
  return values;
}

}  // namespace

Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path) {
  std::error_code unknown;  // what can't be found out is no reason to refuse
  const auto parent = std::filesystem::weakly_canonical(save_path, unknown).parent_path();
  if (!unknown && parent == std::filesystem::weakly_canonical(folder, unknown)) {
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
  for (const auto* names : {&first.record.outside, &first.record.buffers}) {
    for (const auto& name : *names) sources[name] = {.entry = first.tensors.info(name)};
  }
  std::vector<const Source*> order;
  for (const auto& [name, source] : sources) order.push_back(&source);
  std::ranges::stable_sort(order, std::greater{}, [](const Source* source) { return c10::elementSize(source->entry.dtype); });

  std::map<const Source*, std::vector<const RankFile*>> needed;
  for (const auto* source : order) needed[source] = needed_files(*source);  // throws here if values are missing, before anything is written

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
    writer.write(whole(*source, needed.at(source), first));
  }
  writer.close();
  return result;
}

Consolidated consolidate(const std::filesystem::path& folder, const std::filesystem::path& save_path, const Communicator& world) {
  Consolidated result;
  const auto together = [&](c10::function_ref<void()> act) {
    AllOrNone step;
    step.attempt(act);
    step.expect_all(world, {.unit = "consolidation"}, fmt::format("could not consolidate {}", folder.string()));
  };
  together([&] {
    if (world.is_first()) result = consolidate(folder, save_path);
  });
  together([&] {
    if (is_there(save_path)) return;
    throw IoError(fmt::format(
        "{}, which rank 0 has written, is not there for another rank; give all ranks the same path, where all see the same files",
        save_path.string()));
  });
  const auto numbers = at::tensor({result.parameters, result.tensors, result.bytes}, at::kLong).to(world.traits().device);
  world.broadcast(numbers, 0, {.unit = "consolidation"}).wait();
  const auto known = numbers.cpu();
  const auto* const values = known.const_data_ptr<int64_t>();
  return {.parameters = values[0], .tensors = values[1], .bytes = values[2]};
}

}  // namespace tessera::checkpoint
