#include "tessera/checkpoint/live/training_state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
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

/// Returns the part of the state that is the optimizer's.
std::map<std::string, optim::ParameterState> without_averages(std::map<std::string, optim::ParameterState> state) {
  for (auto& [name, tensors] : state) tensors.erase(kAverageKey);
  std::erase_if(state, [](const auto& entry) { return entry.second.empty(); });
  return state;
}

/// Reads tensors of the state for one parameter.
class StateReader {
 public:
  StateReader(const CatalogReader& stored, const at::Tensor& parameter, const Communicator& world)
      : stored_(stored), parameter_(parameter), world_(world) {}

  /// Reads a tensor; returns only its sizes (device "meta") if read_in_place() can read it into the optimizer's own memory later.
  at::Tensor describe_or_read(const std::string& name) const {
    if (!reads_in_place(name)) return read(name);
    stored_.expect_complete(name);
    return at::empty(parameter_.sizes(), at::TensorOptions(stored_.info(name).dtype).device(at::kMeta));
  }

  void read_in_place(const std::string& name, const at::Tensor& to) const {
    if (!to.is_contiguous() || !to.is_cpu()) {
      to.copy_(read(name));
      return;
    }
    const auto part = part_of_rank(0);
    read_part(stored_, name, part, to.view({-1}).narrow(0, 0, part.numel()), world_.local_ranks().front());
  }

 private:
  bool reads_in_place(const std::string& name) const {
    const auto info = shard_info(parameter_);
    const auto& shape = stored_.info(name).shape;
    return info && parameter_.numel() > 1 && !shape.empty() && at::IntArrayRef(info->shape) == shape && world_.local_ranks().size() == 1 &&
           world_.traits().device == parameter_.device();
  }

  /// Options of the host memory into which the files are read.
  at::TensorOptions host(const std::string& name) const { return at::TensorOptions(at::kCPU).dtype(stored_.info(name).dtype); }

  PartRecord part_of_rank(size_t i) const {
    const auto info = shard_info(parameter_);
    return record_of(info->shape, info->strides, info->ranges[i]);
  }

  at::Tensor read(const std::string& name) const {
    const auto& shape = stored_.info(name).shape;
    const auto info = shard_info(parameter_);
    const auto own_shape = info ? at::IntArrayRef(info->shape) : parameter_.sizes();
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < world_.local_ranks().size(); i++) {
      const int rank = world_.local_ranks()[i];
      if (info && is_of_blocks(name)) {
        const auto part = record_of_blocks(*info, info->ranges[i]);
        values.push_back(at::empty({part.numel()}, host(name)));
        read_part(stored_, name, part, values.back(), rank);
      } else if (info && !shape.empty() && own_shape == at::IntArrayRef(shape)) {
        values.push_back(read_values(name, part_of_rank(i), rank));
      } else if (info && info->shape.empty() && shape == std::vector<int64_t>{1}) {  // of a parameter that is one number
        values.push_back(at::empty({info->ranges[i].numel}, host(name)));
        const TensorSlice box{.shape = shape, .offsets = {0}, .sizes = {info->ranges[i].numel}};
        stored_.read(name, box, values.back(), first_file(stored_, rank));
      } else {
        values.push_back(at::empty(shape, host(name)));
        stored_.read(name, whole_slice(shape), values.back(), first_file(stored_, rank));
      }
    }
    return state_of_ranks(std::move(values), parameter_, world_);
  }

  /// In the shape of the shard, without its padding.
  at::Tensor read_values(const std::string& name, const PartRecord& part, int rank) const {
    auto sizes = parameter_.sizes().vec();
    auto values = at::empty({part.numel()}, host(name));
    read_part(stored_, name, part, values, rank);
    const auto row = c10::multiply_integers(at::IntArrayRef(sizes).slice(1));
    sizes.front() = row == 0 ? sizes.front() : part.numel() / row;
    return values.view(sizes);
  }

  const CatalogReader& stored_;
  const at::Tensor& parameter_;
  const Communicator& world_;
};

}  // namespace

std::map<std::string, optim::ParameterState> training_state(const Contents& contents) {
  auto state = contents.optimizer.state(*contents.model);
  if (contents.average == nullptr) return state;
  for (const auto& [name, average] : contents.average->state(*contents.model)) {
    if (state[name].emplace(kAverageKey, average).second) continue;
    throw UsageError("the optimizer calls its own state '{}', as a checkpoint calls a moving average; give it another name", kAverageKey);
  }
  return state;
}

std::map<std::string, optim::ParameterState> read_training_state(const Manifest& manifest, const CatalogReader& stored,
                                                                 const torch::nn::Module& model, const std::set<std::string>& elsewhere,
                                                                 const LoadOptions& options, const Communicator& world) {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(model)) parameters[name] = parameter;
  std::map<std::string, optim::ParameterState> result;
  for (const auto& [name, tensor] : stored.catalog().tensors) {
    if (!is_optimizer_state(name, manifest)) continue;
    const auto place = state_name(name);
    if (elsewhere.contains(place.parameter)) continue;
    const auto parameter = parameters.find(place.parameter);
    if (parameter == parameters.end() && matches(place.parameter, options.may_be_unknown)) continue;
    auto& state = result[place.parameter][place.key];
    if (parameter == parameters.end()) continue;  // the optimizer refuses it by name
    state = StateReader(stored, parameter->second, world).describe_or_read(name);
  }
  return result;
}

void expect_training_state(const Contents& contents, const std::map<std::string, optim::ParameterState>& state, const Manifest& manifest) {
  const auto& model = *contents.model;
  contents.optimizer.expect_state(model, renamed(without_averages(state), manifest.optimizer, contents.optimizer.class_name()));
  if (contents.average == nullptr) {
    if (std::ranges::any_of(state, [](const auto& entry) { return entry.second.contains(kAverageKey); }))
      log(LogLevel::Info, "the checkpoint has a moving average, which is not loaded, because Contents::average was not given");
    return;
  }
  for (const auto& [name, average] : contents.average->state(model)) {
    const auto saved = state.find(name);
    if (saved == state.end() || !saved->second.contains(kAverageKey))
      throw UsageError("the checkpoint has no average of '{}'; leave Contents::average out, and call assign() after loading", name);
    if (saved->second.at(kAverageKey).numel() != average.numel())
      throw UsageError("the average of '{}' that was saved has another shape than the parameter", name);
  }
}

void load_training_state(const Contents& contents, const std::map<std::string, optim::ParameterState>& state, const Manifest& manifest,
                         const CatalogReader& stored, const Communicator& world) {
  const auto& model = *contents.model;
  const auto from = manifest.optimizer, to = contents.optimizer.class_name();
  contents.optimizer.load_state(model, renamed(without_averages(state), from, to));
  const auto own = training_state(contents);
  for (const auto& [name, parameter] : named_parameters(model)) {
    const auto saved = state.find(name), target = own.find(name);
    if (saved == state.end() || target == own.end()) continue;
    for (const auto& [key, tensor] : saved->second) {
      const bool is_average = key == kAverageKey;
      const auto to_memory = target->second.find(is_average ? key : renamed_key(key, from, to));
      if (to_memory == target->second.end() || (!tensor.is_meta() && !is_average)) continue;
      if (tensor.is_meta()) {
        const auto stored_name = fmt::format("{}{}.{}", kOptimizerPrefix, name, key);
        StateReader(stored, parameter, world).read_in_place(stored_name, to_memory->second);
      } else {
        at::Tensor(to_memory->second).copy_(tensor);
      }
    }
  }
  if (contents.average != nullptr) contents.average->was_loaded();
}

}  // namespace tessera::checkpoint
