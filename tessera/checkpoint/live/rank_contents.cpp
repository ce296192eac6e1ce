#include "tessera/checkpoint/live/rank_contents.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/live/beside.h"
#include "tessera/checkpoint/live/contents.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/checkpoint/live/training_state.h"
#include "tessera/optim/average.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

/// Removes the base's parameters from the values of a model, and notes the base in the records.
void leave_out_base(std::vector<RankContents>& ranks, LocalValues& model, const Contents& contents) {
  if (!contents.base) return;
  const auto& base = contents.base->parameters;
  for (const auto& name : base) {
    const bool is_here = model.outside.contains(name) || std::ranges::find(model.parts, name, &LocalPart::name) != model.parts.end();
    if (is_here && !model.frozen.contains(name))
      throw UsageError("'{}' trains, but the checkpoint refers to {} for it; call checkpoint::base_of again, before it changes", name,
                       contents.base->name);
  }
  expect_unchanged(*contents.model, *contents.base);
  for (auto& rank : ranks) rank.record.base = {contents.base->name, contents.base->checksum, contents.base->forms, base};
  std::erase_if(model.parts, [&](const LocalPart& part) { return base.contains(part.name); });
  std::erase_if(model.outside, [&](const auto& named) { return base.contains(named.first); });
  std::erase_if(model.aliases, [&](const auto& alias) { return base.contains(alias.second); });
}

void add_model(std::vector<RankContents>& ranks, const Contents& contents, const Communicator& world) {
  adapters().expect_unmerged(*contents.model);
  auto model = local_values(*contents.model);
  expect_values(model, "a save");
  warn_of_lost_ties(model, world);
  leave_out_base(ranks, model, contents);
  for (const auto& part : model.parts) {
    const auto records = records_of(part);
    const auto values = values_of_ranks(part.values, records, world);
    for (size_t i = 0; i < ranks.size(); i++) {
      if (!ranks[i].record.parts.emplace(part.name, records[i]).second) {
        throw UsageError("two parameters in units of the model are called '{}'; shard the whole model last", part.name);
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
  const auto origin = origin_here(fmt::format("{}", fmt::join(model.layouts, ", ")), fmt::format("{}", fmt::join(model.meshes, ", ")));
  const auto described = adapters().describe(*contents.model);
  for (auto& rank : ranks) {
    rank.record.adapters = described;
    rank.record.aliases = model.aliases;
    rank.record.origin = origin;
  }
}

void add_optimizer(std::vector<RankContents>& ranks, const Contents& contents, const Communicator& world) {
  if (contents.average != nullptr) contents.average->expect_savable();
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(*contents.model)) parameters[name] = parameter;
  for (const auto& [parameter, state] : training_state(contents)) {
    for (const auto& [key, tensor] : state) {
      const auto name = fmt::format("{}{}.{}", kOptimizerPrefix, parameter, key);
      const auto records = records_of_state(parameters.at(parameter), key, tensor, world);
      const auto values = values_of_ranks(tensor, records, world);
      for (size_t i = 0; i < ranks.size(); i++) {
        ranks[i].record.state[name] = records[i];
        ranks[i].tensors.emplace_back(name, values[i]);
      }
    }
  }
}

}  // namespace

std::vector<RankContents> contents_of_ranks(uint64_t save, const Contents& contents, const Communicator& world) {
  std::vector<RankContents> ranks;
  std::map<std::string, std::string> notes;
  for (const auto& [name, note] : contents.notes) notes[name] = note.text();
  for (const int rank : world.local_ranks()) {
    ranks.push_back(
        {.record = {.rank = rank, .ranks = world.size(), .save = save, .optimizer = contents.optimizer.class_name(), .notes = notes}});
  }
  add_model(ranks, contents, world);
  if (contents.optimizer) add_optimizer(ranks, contents, world);
  add_beside(ranks, contents, world);
  for (auto& rank : ranks) {
    rank.record.generator = kHiddenGeneratorName;
    rank.tensors.emplace_back(rank.record.generator, state_of_generator(at::kCPU));
    if (const auto device = device_with_generator(world); !device.is_cpu()) {
      rank.record.device_generator = generator_name(device);
      rank.tensors.emplace_back(rank.record.device_generator, state_of_generator(device));
    }
    sort_by_width(rank.tensors, [](const auto& named) { return named.second.scalar_type(); });
  }
  return ranks;
}

std::vector<SafetensorsEntry> entries_of(const RankContents& rank) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : rank.tensors)
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  return entries;
}

void warn_of_lost_ties(const LocalValues& model, const Communicator& world) {
  if (!world.is_first()) return;
  static std::mutex mutex;
  static std::set<std::string> warned;
  for (const auto& part : model.parts) {
    if (part.has_member()) continue;
    const auto other =
        std::ranges::find_if(model.parts, [&](const LocalPart& each) { return each.shape == part.shape && each.has_member(); });
    if (other == model.parts.end()) continue;
    const std::lock_guard lock(mutex);
    if (!warned.insert(part.name).second) continue;
    log(LogLevel::Warning,
        fmt::format("'{0}' is saved with the values that it had first: its module's member is another tensor, perhaps that of '{1}', so "
                    "nothing trains it. If the two should be tied, register one tensor under both names; programs that tie them would "
                    "take either, and loading into a model in which they are tied needs first_of_tied",
                    part.name, other->name));
  }
}

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
    throw UsageError("the note '{}' holds bytes that are no UTF-8; notes are text, so write such bytes in digits", printable(name));
  }
}

}  // namespace tessera::checkpoint
