#include "tessera/checkpoint/live/training_state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/checkpoint/stored/optimizer_keys.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/optim/average.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kAverageKey = "average";  // no optimizer has state of this name

PartRecord part_of_rank(const ShardInfo& info, size_t i) {
  return record_of(info.shape, info.strides, info.ranges[i]);
}

}  // namespace

std::map<std::string, optim::ParameterState> training_state(const Contents& contents) {
  auto state = contents.optimizer.state(*contents.model);
  if (contents.average == nullptr) return state;
  for (const auto& [name, average] : contents.average->state(*contents.model)) {
    if (state[name].emplace(kAverageKey, average).second) continue;
    throw UsageError("the optimizer has state called '{}', which is the name of an average in checkpoints; give it another name",
                     kAverageKey);
  }
  return state;
}

SavedState::SavedState(const Contents& contents, const Manifest& manifest, const CatalogReader& stored,
                       const std::set<std::string>& elsewhere, const LoadOptions& options, const Communicator& world,
                       const std::string& where)
    : contents_(contents), manifest_(manifest), stored_(stored), world_(world) {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(*contents.model)) parameters[name] = parameter;
  for (const auto& [name, tensor] : stored.catalog().tensors) {
    if (!is_optimizer_state(name, manifest)) continue;
    const auto place = state_name(name);
    if (elsewhere.contains(place.parameter)) continue;
    const auto found = parameters.find(place.parameter);
    if (found == parameters.end() && matches(place.parameter, options.may_be_unknown)) continue;
    if (found == parameters.end()) {
      std::vector<std::string> names;
      for (const auto& entry : parameters) names.push_back(entry.first);
      throw UsageError(
          "{} has the optimizer's state of '{}', but the model here lists {}; list its parameters as that run did (--flatten-parameters, "
          "fsdp_use_orig_params, ShardOptions::listing)",
          where, place.parameter, some_of(names));
    }
    auto& state = state_[place.parameter][place.key];
    const auto& parameter = found->second;
    if (reads_in_place(name, parameter)) {
      stored.expect_complete(name);
      state = at::empty(parameter.sizes(), at::TensorOptions(tensor.dtype).device(at::kMeta));
    } else {
      state = read(name, parameter);
    }
  }
  try {
    contents.optimizer.expect_state(*contents.model, of_optimizer());
    expect_average();
  } catch (const UsageError& error) {
    throw UsageError("{}: {}", where, error.what());
  }
}

void SavedState::expect_average() const {
  if (contents_.average == nullptr) {
    if (world_.is_first() && std::ranges::any_of(state_, [](const auto& entry) { return entry.second.contains(kAverageKey); }))
      log(LogLevel::Warning,
          "the checkpoint has a moving average, which is not loaded and ends here; to keep it, give --ema (Contents::average)");
    return;
  }
  for (const auto& [name, average] : contents_.average->state(*contents_.model)) {
    const auto saved = state_.find(name);
    if (saved == state_.end() || !saved->second.contains(kAverageKey))
      throw UsageError(
          "it has no average of '{}'; resume without one, as it was saved (no --ema, no Contents::average), or begin one in the program by "
          "assign() after loading",
          name);
    if (saved->second.at(kAverageKey).numel() != average.numel())
      throw UsageError("the average of '{}' that was saved has another shape than the parameter", name);
  }
}

void SavedState::load() const {
  const auto &from = manifest_.optimizer, to = contents_.optimizer.class_name();
  contents_.optimizer.load_state(*contents_.model, of_optimizer());
  const auto own = training_state(contents_);
  for (const auto& [name, parameter] : named_parameters(*contents_.model)) {
    const auto saved = state_.find(name), target = own.find(name);
    if (saved == state_.end() || target == own.end()) continue;
    for (const auto& [key, tensor] : saved->second) {
      const bool is_average = key == kAverageKey;
      const auto memory = target->second.find(is_average ? key : renamed_key(key, from, to));
      if (memory == target->second.end()) continue;
      if (tensor.is_meta()) {
        read_in_place(fmt::format("{}{}.{}", kOptimizerPrefix, name, key), parameter, memory->second);
      } else if (is_average) {
        at::Tensor(memory->second).copy_(tensor);
      }
    }
  }
  if (contents_.average != nullptr) contents_.average->was_loaded();
}

std::map<std::string, optim::ParameterState> SavedState::of_optimizer() const {
  auto state = state_;
  for (auto& [name, tensors] : state) tensors.erase(kAverageKey);
  std::erase_if(state, [](const auto& entry) { return entry.second.empty(); });
  return renamed(std::move(state), manifest_.optimizer, contents_.optimizer.class_name());
}

bool SavedState::reads_in_place(const std::string& name, const at::Tensor& parameter) const {
  const auto info = shard_info(parameter);
  const auto& shape = stored_.info(name).shape;
  return info && parameter.numel() > 1 && !shape.empty() && at::IntArrayRef(info->shape) == shape && world_.local_ranks().size() == 1 &&
         world_.traits().device == parameter.device();
}

void SavedState::read_in_place(const std::string& name, const at::Tensor& parameter, const at::Tensor& to) const {
  if (!to.is_contiguous() || !to.is_cpu()) {
    to.copy_(read(name, parameter));
    return;
  }
  const auto part = part_of_rank(*shard_info(parameter), 0);
  read_part(stored_, name, part, to.view({-1}).narrow(0, 0, part.numel()), world_.local_ranks().front());
}

at::Tensor SavedState::read(const std::string& name, const at::Tensor& parameter) const {
  const auto& shape = stored_.info(name).shape;
  const auto info = shard_info(parameter);
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < world_.local_ranks().size(); i++) {
    auto part = whole_record(shape);
    auto sizes = shape;
    if (info && is_of_blocks(name)) {
      part = record_of_blocks(*info, info->ranges[i]);
      sizes = {part.numel()};
    } else if (info && !shape.empty() && at::IntArrayRef(info->shape) == at::IntArrayRef(shape)) {  // the shard without its padding
      part = part_of_rank(*info, i);
      sizes = parameter.sizes().vec();
      const auto row = c10::multiply_integers(at::IntArrayRef(sizes).slice(1));
      if (row > 0) sizes.front() = part.numel() / row;
    } else if (info && info->shape.empty() && shape == std::vector<int64_t>{1}) {  // state of a parameter that is one number
      sizes = part.slices.front().sizes = {info->ranges[i].numel};
    }
    values.push_back(at::empty(sizes, at::TensorOptions(at::kCPU).dtype(stored_.info(name).dtype)));
    read_part(stored_, name, part, values.back().view({-1}), world_.local_ranks()[i]);
  }
  return state_of_ranks(std::move(values), parameter, world_);
}

}  // namespace tessera::checkpoint
