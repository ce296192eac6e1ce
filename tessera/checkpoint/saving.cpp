#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "tessera/base/atomic_write.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/contents.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/part_records.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// What is written to the file of one rank.
struct RankContents {
  RankRecord record;
  std::vector<std::pair<std::string, at::Tensor>> tensors = {};
};

uint64_t draw_save(const Communicator& world) {
  std::random_device source;
  const auto number = at::full({1}, static_cast<int64_t>(source()), at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.broadcast(number, 0, {.unit = "checkpoint"}).wait();
  return static_cast<uint64_t>(number.item<int64_t>());
}

at::Tensor generator_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void add_model(std::vector<RankContents>& ranks, const torch::nn::Module& module, const Communicator& world) {
  const auto model = local_values(module);
  for (const auto& part : model.parts) {
    const auto records = records_of(part);
    const auto values = values_of_ranks(part.values, records, world);
    for (size_t i = 0; i < ranks.size(); i++) {
      if (!ranks[i].record.parts.emplace(part.name, records[i]).second) {
        throw UsageError(fmt::format("two parameters in units of the model are called '{}'; shard the whole model last", part.name));
      }
      ranks[i].tensors.emplace_back(part.name, values[i]);
    }
  }
  const auto whole_values = [&](const at::Tensor& tensor) { return values_of_ranks(tensor, whole_records(tensor.sizes(), world), world); };
  for (const auto& [name, tensor] : model.outside) {
    if (!world.is_first()) break;
    ranks.front().record.outside.push_back(name);
    ranks.front().tensors.emplace_back(name, whole_values(tensor).front());
  }
  for (const auto& [name, tensor] : model.buffers) {
    const auto values = whole_values(tensor.to(original_dtype(tensor)));
    for (size_t i = 0; i < ranks.size(); i++) {
      ranks[i].record.buffers.push_back(name);
      ranks[i].tensors.emplace_back(name, values[i]);
    }
  }
  for (auto& rank : ranks) rank.record.aliases = model.aliases;
}

void add_optimizer(std::vector<RankContents>& ranks, const Contents& contents, const Communicator& world) {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(*contents.model)) parameters[name] = parameter;
  for (const auto& [parameter, state] : contents.optimizer.state(*contents.model)) {
    for (const auto& [key, tensor] : state) {
      const auto name = fmt::format("{}{}.{}", kOptimizerPrefix, parameter, key);
      const auto records = records_of_state(parameters.at(parameter), tensor, world);
      const auto values = values_of_ranks(tensor, records, world);
      for (size_t i = 0; i < ranks.size(); i++) {
        ranks[i].record.state[name] = records[i];
        ranks[i].tensors.emplace_back(name, values[i]);
      }
    }
  }
}

/// The contents for every rank that this process represents.
std::vector<RankContents> contents_of_ranks(uint64_t save, const Contents& contents, const Communicator& world) {
  std::vector<RankContents> ranks;
  std::map<std::string, std::string> notes;
  for (const auto& [name, note] : contents.notes) notes[name] = note.text();
  for (const int rank : world.local_ranks()) {
    ranks.push_back(
        {.record = {.rank = rank, .ranks = world.size(), .save = save, .optimizer = contents.optimizer.class_name(), .notes = notes}});
  }
  add_model(ranks, *contents.model, world);
  if (contents.optimizer) add_optimizer(ranks, contents, world);
  for (auto& rank : ranks) {
    rank.tensors.emplace_back(kGeneratorName, generator_state());
    // The widest dtype comes first, so that every value is aligned to its width for programs that map the file into memory.
    std::ranges::stable_sort(rank.tensors, std::greater{}, [](const auto& named) { return named.second.element_size(); });
  }
  return ranks;
}

/// Throws UsageError for what JSON can't hold: bytes that are no UTF-8.
void expect_text(const Notes& notes) {
  const auto is_text = [](const std::string& text) {
    try {
      return nlohmann::json(text).dump().size() > 1;
    } catch (const nlohmann::json::type_error&) {
      return false;
    }
  };
  for (const auto& [name, note] : notes) {
    if (is_text(name) && is_text(note.text())) continue;
    throw UsageError(fmt::format("the note '{}' holds bytes that are no UTF-8; notes are text, so write such bytes in digits", name));
  }
}

void write_rank_file(const fs::path& folder, const RankContents& rank) {
  const auto& record = rank.record;
  if (!is_there(folder)) {
    throw IoError(fmt::format("the folder {} that rank 0 has made is not there for rank {}; save where all ranks see the same files",
                              folder.string(), record.rank));
  }
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : rank.tensors)
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  SafetensorsWriter writer(rank_file(folder, record.rank, record.ranks), std::move(entries), to_metadata(record));
  for (const auto& [name, tensor] : rank.tensors) writer.write(tensor);
  writer.close();
}

/// Renames a folder that is no complete checkpoint, so that a run which has resumed from an earlier one can save under its name.
void set_aside(const fs::path& folder) {
  std::error_code unknown;
  if (!fs::is_directory(folder, unknown)) return;
  const auto why = why_incomplete(folder);
  if (!why) return;
  auto aside = fs::path(folder.string() + ".damaged");
  for (int number = 2; is_there(aside); number++) aside = fmt::format("{}.damaged-{}", folder.string(), number);
  fs::rename(folder, aside, unknown);
  if (unknown) throw IoError(fmt::format("can't set {} aside, which is no complete checkpoint: {}", folder.string(), unknown.message()));
  log(LogLevel::Warning, fmt::format("set aside as {}: {}", aside.string(), *why));
}

}  // namespace

void save(const fs::path& given, const Contents& contents, const Communicator& world) {
  expect_idle("checkpoint::save");
  expect_model(contents);
  const auto folder = given.has_filename() ? given : given.parent_path();  // "run/net/" is "run/net"
  if (folder.empty()) throw UsageError("a checkpoint needs a folder; this name is empty");
  expect_text(contents.notes);
  const auto failure = fmt::format("could not save {}; nothing of it was kept", folder.string());
  const auto together = [&](const std::function<void()>& act) {
    AllOrNone step;
    step.attempt(act);
    step.expect_all(world, {.unit = "checkpoint"}, failure);
  };
  const c10::AutoGradMode no_grad(false);
  const auto number = draw_save(world);
  std::optional<NewFolder> made;  // only in the process of rank 0
  try {
    together([&] {
      if (!world.is_first()) return;
      set_aside(folder);
      made.emplace(folder);
    });
    together([&] {
      for (const auto& rank : contents_of_ranks(number, contents, world)) write_rank_file(unfinished_path(folder), rank);
    });
    together([&] {
      if (!made) return;
      write_manifest(unfinished_path(folder), manifest_of_files(unfinished_path(folder)));
      made->commit();
    });
  } catch (const CommError&) {
    if (made) made->abandon();
    throw;
  }
}

}  // namespace tessera::checkpoint
