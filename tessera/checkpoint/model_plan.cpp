#include "tessera/checkpoint/model_plan.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <regex>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/part_records.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/local_values.h"

namespace tessera::checkpoint {
namespace {

bool matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) {
    try {
      return std::regex_match(name, std::regex(pattern));
    } catch (const std::regex_error& error) {
      throw UsageError(fmt::format("'{}' in LoadOptions is no regular expression: {}", pattern, error.what()));
    }
  });
}

/// Whether values of one dtype can become those of the other. Numbers may be rounded, but not to integers.
bool converts(at::ScalarType from, at::ScalarType to) {
  return from == to || (at::isFloatingType(to) && !at::isComplexType(from));
}

}  // namespace

ModelPlan::ModelPlan(const CatalogReader& stored, std::set<std::string> names, const LocalValues& model, const LoadOptions& options,
                     const std::string& where)
    : stored_(stored), unused_(std::move(names)) {
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& [alias, first] : model.aliases) aliases[first].push_back(alias);
  for (const auto& part : model.parts) find(part.name, aliases[part.name], part.values, part.shape);
  for (const auto& [name, tensor] : model.outside) find(name, aliases[name], tensor, tensor.sizes());
  for (const auto& [name, tensor] : model.buffers) find(name, {}, tensor, tensor.sizes());
  std::erase_if(missing_, [&](const std::string& name) { return matches(name, options.may_be_missing); });
  std::erase_if(unused_, [&](const std::string& name) { return matches(name, options.may_be_unknown); });
  std::vector<std::string> faults;
  if (!missing_.empty()) faults.push_back("it has no " + some_of(missing_));
  if (!unused_.empty()) faults.push_back("the model has no " + some_of({unused_.begin(), unused_.end()}));
  if (!missing_.empty() || !unused_.empty()) faults.emplace_back("what may differ can be named in LoadOptions");
  faults.insert(faults.end(), misfits_.begin(), misfits_.begin() + std::min<std::ptrdiff_t>(std::ssize(misfits_), 5));
  if (misfits_.size() > 5) faults.push_back(fmt::format("and {} more do not fit", misfits_.size() - 5));
  if (!faults.empty()) throw UsageError(fmt::format("{} is of another model: {}", where, fmt::join(faults, "; ")));
  for (const auto& [name, found] : found_) stored.expect_complete(found);
}

void ModelPlan::find(const std::string& name, const std::vector<std::string>& other_names, const at::Tensor& here, at::IntArrayRef shape) {
  auto candidates = other_names;
  candidates.insert(candidates.begin(), name);
  // A tied parameter may be stored once, under any of its names.
  for (const auto& candidate : std::vector(candidates)) {
    const auto& aliases = stored_.catalog().aliases;
    if (const auto first = aliases.find(candidate); first != aliases.end()) candidates.push_back(first->second);
  }
  for (const auto& candidate : candidates) {
    const auto stored = stored_.catalog().tensors.find(candidate);
    if (stored == stored_.catalog().tensors.end()) continue;
    unused_.erase(candidate);
    if (!found_.try_emplace(name, candidate).second) continue;
    const auto& there = stored->second;
    const auto dtype = original_dtype(here);
    if (at::IntArrayRef(there.shape) == shape && converts(there.dtype, dtype)) continue;
    misfits_.push_back(fmt::format("'{}' is {} of [{}] there, but {} of [{}] in the model", candidate, c10::toString(there.dtype),
                                   fmt::join(there.shape, ", "), c10::toString(dtype), fmt::join(shape, ", ")));
  }
  if (!found_.contains(name)) missing_.push_back(name);
}

void ModelPlan::load(const LocalValues& model, const Communicator& world) const {
  for (const auto& part : model.parts) load_part(part, world);
  for (const auto& [name, tensor] : model.outside) load_whole(name, tensor, world);
  for (const auto& [name, tensor] : model.buffers) load_whole(name, tensor, world);
}

void ModelPlan::load_part(const LocalPart& part, const Communicator& world) const {
  const auto found = found_.find(part.name);
  if (found == found_.end()) return;
  const auto records = records_of(part);
  if (part.values.is_cpu() && records.size() == 1) {  // without a copy
    read_part(stored_, found->second, records.front(), part.values.narrow(0, 0, records.front().numel()), world.local_ranks().front());
    return;
  }
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < records.size(); i++) {
    values.push_back(at::empty({records[i].numel()}, part.values.scalar_type()));
    read_part(stored_, found->second, records[i], values.back(), world.local_ranks()[i]);
  }
  at::Tensor(part.values).copy_(tensor_of_ranks(std::move(values), part.values, records, world));
}

void ModelPlan::load_whole(const std::string& name, const at::Tensor& tensor, const Communicator& world) const {
  const auto found = found_.find(name);
  if (found == found_.end()) return;
  std::vector<at::Tensor> values;
  for (const int rank : world.local_ranks()) {
    values.push_back(at::empty(tensor.sizes(), tensor.scalar_type()));
    stored_.read(found->second, whole_slice(tensor.sizes()), values.back(), first_file(stored_, rank));
  }
  at::Tensor(tensor).copy_(tensor_of_ranks(std::move(values), tensor, whole_records(tensor.sizes(), world), world));
}

size_t first_file(const CatalogReader& stored, int rank) {
  return static_cast<size_t>(rank) % std::max<size_t>(stored.catalog().files.size(), 1);
}

void read_part(const CatalogReader& stored, const std::string& name, const PartRecord& part, const at::Tensor& values, int rank) {
  const auto views = views_of_slices(values, part.slices, part.strides);
  for (size_t i = 0; i < views.size(); i++) stored.read(name, part.slices[i], views[i], first_file(stored, rank));
}

}  // namespace tessera::checkpoint
