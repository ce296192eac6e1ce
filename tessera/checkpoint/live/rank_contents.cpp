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
      throw UsageError(
          "'{}' trains, but Contents::base says that {} holds it; call checkpoint::base_of again, before the parameter changes", name,
          contents.base->name);
  }
  expect_unchanged(*contents.model, *contents.base);
  for (auto& rank : ranks) rank.record.base = {contents.base->name, contents.base->checksum, contents.base->forms, base};
  std::erase_if(model.parts, [&](const LocalPart& part) { return base.contains(part.name); });
  std::erase_if(model.outside, [&](const auto& named) { return base.contains(named.first); });
  std::erase_if(model.aliases, [&](const auto& alias) { return base.contains(alias.second); });
}

/// Collects the contents of this process's ranks, tensor by tensor.
struct Gathered {
  const Contents& contents;
  const Communicator& world;
  std::vector<RankContents> ranks;

  /// Adds each rank's part of a tensor.
  void add(std::map<std::string, PartRecord> RankRecord::*where, const std::string& name, const at::Tensor& tensor,
           const std::vector<PartRecord>& parts) {
    const auto values = values_of_ranks(tensor, parts, world);
    for (size_t i = 0; i < ranks.size(); i++) {
      if (!(ranks[i].record.*where).emplace(name, parts[i]).second)
        throw UsageError("two units of the model have a parameter called '{}'; call fully_shard for the whole model last", name);
      ranks[i].tensors.emplace_back(name, values[i]);
    }
  }

  /// Adds a tensor that each rank has as a whole. Each rank saves its own values if `by_all`, otherwise rank 0 saves them for all.
  void add(std::vector<std::string> RankRecord::*where, const std::string& name, const at::Tensor& tensor, bool by_all = true) {
    if (!by_all && !world.is_first()) return;
    const auto values = values_of_ranks(tensor, whole_records(tensor.sizes(), world), world);
    for (size_t i = 0; i < (by_all ? ranks.size() : 1); i++) {
      (ranks[i].record.*where).push_back(name);
      ranks[i].tensors.emplace_back(name, values[i]);
    }
  }

  void add_model() {
    adapters().expect_unmerged(*contents.model);
    auto model = local_values(*contents.model);
    expect_values(model, "a save");
    warn_of_lost_ties(model, world);
    leave_out_base(ranks, model, contents);
    for (const auto& part : model.parts) add(&RankRecord::parts, part.name, part.values, records_of(part));
    for (const auto& [name, tensor] : model.outside) add(&RankRecord::whole, name, tensor, /*by_all=*/false);
    for (const auto& [name, tensor] : model.buffers) add(&RankRecord::buffers, name, tensor.to(original_dtype(tensor)));
    const auto origin = origin_here(fmt::format("{}", fmt::join(model.layouts, ", ")), fmt::format("{}", fmt::join(model.meshes, ", ")));
    const auto described = adapters().describe(*contents.model);
    for (auto& rank : ranks) {
      rank.record.adapters = described;
      rank.record.aliases = model.aliases;
      rank.record.origin = origin;
    }
  }

  void add_optimizer() {
    if (contents.average != nullptr) contents.average->expect_savable();
    std::map<std::string, at::Tensor> parameters;
    for (const auto& [name, parameter] : named_parameters(*contents.model)) parameters[name] = parameter;
    for (const auto& [parameter, state] : training_state(contents)) {
      for (const auto& [key, tensor] : state) {
        add(&RankRecord::state, fmt::format("{}{}.{}", kOptimizerPrefix, parameter, key), tensor,
            records_of_state(parameters.at(parameter), key, tensor, world));
      }
    }
  }

  void add_beside() {
    for (const auto& [name, tensor] : contents.tensors) add(&RankRecord::beside, kBesidePrefix + name, tensor, /*by_all=*/false);
    for (const auto& [name, tensor] : contents.tensors_by_rank) add(&RankRecord::by_rank, kBesidePrefix + name, as_rows(tensor));
  }

  void add_generators() {
    const auto device = device_with_generator(world);
    for (auto& [record, tensors] : ranks) {
      tensors.emplace_back(record.generator = kHiddenGeneratorName, state_of_generator(at::kCPU));
      if (!device.is_cpu()) tensors.emplace_back(record.device_generator = generator_name(device), state_of_generator(device));
    }
  }
};

}  // namespace

std::vector<RankContents> contents_of_ranks(uint64_t save, const Contents& contents, const Communicator& world) {
  Gathered all{.contents = contents, .world = world, .ranks = {}};
  std::map<std::string, std::string> notes;
  for (const auto& [name, note] : contents.notes) notes[name] = note.text();
  for (const int rank : world.local_ranks()) {
    all.ranks.push_back(
        {.record = {.rank = rank, .ranks = world.size(), .save = save, .optimizer = contents.optimizer.class_name(), .notes = notes}});
  }
  all.add_model();
  if (contents.optimizer) all.add_optimizer();
  all.add_beside();
  all.add_generators();
  for (auto& rank : all.ranks) sort_by_width(rank.tensors, [](const auto& named) { return named.second.scalar_type(); });
  return std::move(all.ranks);
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
        fmt::format("'{0}' is saved with its initial values: its module's member is another tensor, perhaps that of '{1}', so nothing "
                    "trains the registered one. If the two should be tied, register one tensor under both names; otherwise programs that "
                    "tie them may take either value, and loading into a model in which they are tied needs first_of_tied",
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
    throw UsageError("the note '{}' holds bytes that are no UTF-8; notes are text, so encode such bytes, for example as hexadecimal digits",
                     printable(name));
  }
}

}  // namespace tessera::checkpoint
