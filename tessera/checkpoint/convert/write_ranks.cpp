// Writes a run as a checkpoint of Tessera: the files of all ranks, one after the other.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// The file of one rank: its record, and the boxes of tensors in it.
class RankPart {
 public:
  RankPart(const RunSource& source, int rank, uint64_t save) : source_(source), rank_(rank) {
    const auto& run = source.run();
    const auto ranks = source.options().world;
    record_ = {.rank = rank,
               .ranks = ranks,
               .save = save,
               .aliases = run.catalog.aliases,
               .optimizer = run.optimizer,
               .generator = run.generator,
               .notes = notes_of_rank(run, rank, ranks, {.notes_of_first_rank = source.options().notes_of_first_rank}),
               .base = run.base,
               .adapters = run.adapters,
               .origin = origin_here("flat", fmt::format("shard {}", ranks))};
    if (const auto generator = read_generator(source.stored(), run, rank)) generators_.emplace_back(run.generator, generator->get_state());
    // If the number of ranks changes, device generators are left out: to make a generator for a new rank needs the device.
    if (const auto state = run.ranks == ranks ? stored_device_generator(source.stored(), run, rank) : at::Tensor(); state.defined()) {
      record_.device_generator = run.device_generator;
      generators_.emplace_back(run.device_generator, state);
    }
    for (const auto& tensor : source.model()) add_model(tensor);
    for (const auto& tensor : source.state()) {
      const auto part = tensor.shape.empty() ? whole(tensor) : even_part(tensor);
      record_.state[tensor.name] = part;
      add(tensor, part, tensor.shape.empty());
    }
    for (const auto& tensor : source.beside()) {
      if (rank != 0) break;
      record_.beside.push_back(tensor.name);
      add(tensor, whole(tensor), true);
    }
    sort_by_width(items_, [](const Item& item) { return item.tensor->dtype; });
  }

  void write(const fs::path& folder) const {
    std::vector<SafetensorsEntry> entries;
    for (const auto& item : items_) entries.push_back({.name = item.tensor->name, .dtype = item.tensor->dtype, .sizes = item.sizes});
    for (const auto& [name, state] : generators_)
      entries.push_back({.name = name, .dtype = state.scalar_type(), .sizes = state.sizes().vec()});
    SafetensorsWriter writer(rank_file(folder, rank_, record_.ranks), std::move(entries), to_metadata(record_));
    for (const auto& item : items_) {
      if (item.part.numel() == 0) writer.append(at::empty({0}, at::TensorOptions(at::kCPU).dtype(item.tensor->dtype)));
      const auto append = [&](const TensorSlice&, const at::Tensor& values) { writer.append(values); };
      for (const auto& slice : item.part.slices) {
        if (slice.numel() > 0) source_.copy(*item.tensor, slice, append, first_file(source_.stored(), rank_));
      }
    }
    for (const auto& [name, state] : generators_) writer.write(state);
    writer.close();
  }

 private:
  struct Item {
    const SourceTensor* tensor;
    PartRecord part;
    std::vector<int64_t> sizes;
  };

  static PartRecord whole(const SourceTensor& tensor) {
    return record_of(tensor.shape, c10::contiguous_strides(tensor.shape), {.begin = 0, .numel = c10::multiply_integers(tensor.shape)});
  }

  /// Returns an even share of the values: the ranks' shares differ by at most one value.
  PartRecord even_part(const SourceTensor& tensor) const {
    const auto numel = c10::multiply_integers(tensor.shape), ranks = int64_t{record_.ranks}, rank = int64_t{rank_};
    const auto begin_of = [&](int64_t each) { return numel / ranks * each + std::min(each, numel % ranks); };
    return record_of(tensor.shape, c10::contiguous_strides(tensor.shape),
                     {.begin = begin_of(rank), .numel = begin_of(rank + 1) - begin_of(rank)});
  }

  void add(const SourceTensor& tensor, const PartRecord& part, bool keeps_shape) {
    items_.push_back({&tensor, part, keeps_shape ? tensor.shape : std::vector{part.numel()}});
  }

  void add_model(const SourceTensor& tensor) {
    if (source_.run().catalog.buffers.contains(tensor.name)) {
      record_.buffers.push_back(tensor.name);
      add(tensor, whole(tensor), true);
    } else if (tensor.shape.empty()) {
      if (rank_ != 0) return;
      record_.whole.push_back(tensor.name);
      add(tensor, whole(tensor), true);
    } else {
      const auto part = even_part(tensor);
      record_.parts[tensor.name] = part;
      add(tensor, part, false);
    }
  }

  const RunSource& source_;
  const int rank_;
  std::vector<std::pair<std::string, at::Tensor>> generators_;
  RankRecord record_;
  std::vector<Item> items_;
};

}  // namespace

std::vector<fs::path> write_ranks(const RunSource& source, const fs::path& out) {
  NewFolder made(out);
  const auto folder = unfinished_path(out);
  const uint64_t save = std::random_device()();
  for (int rank = 0; rank < source.options().world; rank++) RankPart(source, rank, save).write(folder);
  write_manifest(folder, manifest_of_files(folder, source.options().world));
  made.commit();
  return {out};
}

}  // namespace tessera::checkpoint
