#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/contents.h"
#include "tessera/checkpoint/part_records.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

using OptimizerState = std::map<std::string, optim::ParameterState>;

/// The opened files of a checkpoint, checked against the model.
struct Saved {
  std::vector<RankFile> own;  // one for each local rank
  RankFile first;             // rank 0's
  OptimizerState optimizer = {};
  at::Tensor generator = {};

  /// The tensor with this name from the file of each local rank.
  std::vector<at::Tensor> read(const std::string& name) const {
    std::vector<at::Tensor> values;
    for (const auto& file : own) values.push_back(file.tensors.read(name));
    return values;
  }
};

void set_generator_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Throws IoError if the state is none of a generator. libtorch would notice only when it is set.
void expect_generator_state(const at::Tensor& state, const fs::path& file) {
  try {
    at::detail::createCPUGenerator().set_state(state);
  } catch (const std::exception& error) {
    throw IoError(fmt::format("the state of the random generator in {} is damaged: {}", file.string(), first_line(error)));
  }
}

/// Throws IoError if a value that will be read is damaged. This reads everything once more than needed, so that nothing is changed then.
void verify(const Saved& saved) {
  for (const auto& file : saved.own) {
    for (const auto& name : file.tensors.names()) file.tensors.verify(name);
  }
  for (const auto& name : saved.first.record.outside) saved.first.tensors.verify(name);
}

/// Throws UsageError if a name is only in the checkpoint or only in the model.
template <class There, class Here>
void expect_same_names(const fs::path& folder, const char* what, const There& there, const Here& here) {
  std::vector<std::string> missing, unknown;
  std::ranges::set_difference(here, there, std::back_inserter(missing));
  std::ranges::set_difference(there, here, std::back_inserter(unknown));
  if (missing.empty() && unknown.empty()) return;
  throw UsageError(fmt::format("the checkpoint {} is of another model, or of one that was sharded otherwise: {}{}{}", folder.string(),
                               missing.empty() ? "" : fmt::format("it has no {} {}", what, some_of(missing)),
                               missing.empty() || unknown.empty() ? "" : "; ",
                               unknown.empty() ? "" : fmt::format("the model has no {} {}", what, some_of(unknown))));
}

template <class Map>
std::vector<std::string> names_of(const Map& map) {
  std::vector<std::string> names;
  for (const auto& [name, value] : map) names.push_back(name);
  return names;
}

void expect_same_tensor(const SafetensorsFile& file, const std::string& name, const at::Tensor& here, at::IntArrayRef sizes) {
  const auto& there = file.info(name);
  const auto dtype = original_dtype(here);
  if (at::IntArrayRef(there.sizes) != sizes || there.dtype != dtype) {
    throw UsageError(fmt::format("'{}' is {} of [{}] in {}, but {} of [{}] in the model", name, c10::toString(there.dtype),
                                 fmt::join(there.sizes, ", "), file.path().string(), c10::toString(dtype), fmt::join(sizes, ", ")));
  }
}

void expect_same_parameter(const RankFile& file, const LocalPart& part) {
  const auto& there = file.record.parts.at(part.name);
  const auto where = file.tensors.path().string();
  if (there.shape != part.shape) {
    throw UsageError(fmt::format("'{}' has the shape [{}] in {}, but [{}] in the model", part.name, fmt::join(there.shape, ", "), where,
                                 fmt::join(part.shape, ", ")));
  }
  if (there.strides != part.strides) {
    throw UsageError(fmt::format(
        "'{}' lies in memory with the strides [{}] in {}, but [{}] in the model; give it the same memory format before it is sharded",
        part.name, fmt::join(there.strides, ", "), where, fmt::join(part.strides, ", ")));
  }
}

std::string text_of(const std::vector<TensorSlice>& slices) {
  std::vector<std::string> texts;
  for (const auto& slice : slices) texts.push_back(to_string(slice));
  return texts.empty() ? "nothing" : fmt::format("{}", fmt::join(texts, " and "));
}

void expect_same_part(const RankFile& file, const LocalPart& part, const PartRecord& here) {
  const auto& there = file.record.parts.at(part.name);
  if (there.slices != here.slices) {
    throw UsageError(fmt::format("of '{}' {} has {}, this rank of the model {}; shard the model as it was when it was saved", part.name,
                                 file.tensors.path().string(), text_of(there.slices), text_of(here.slices)));
  }
  expect_same_tensor(file.tensors, part.name, part.values, {here.numel()});
}

/// The records of a parameter for each local rank, by its name.
using Records = std::map<std::string, std::vector<PartRecord>>;

Records all_records(const LocalValues& model) {
  Records records;
  for (const auto& part : model.parts) records[part.name] = records_of(part);
  return records;
}

/// Throws UsageError if the file of local rank number `i` does not fit the model.
void expect_same_model(const fs::path& folder, const LocalValues& model, const Records& records, const Saved& saved, size_t i) {
  const auto& file = saved.own[i];
  expect_same_names(folder, "sharded parameter", names_of(file.record.parts), names_of(records));
  expect_same_names(folder, "parameter in no unit", saved.first.record.outside, names_of(model.outside));
  expect_same_names(folder, "buffer", file.record.buffers, names_of(model.buffers));
  // Shapes are compared first: one parameter of another shape moves the parts of all others, whose errors would hide the cause.
  for (const auto& part : model.parts) expect_same_parameter(file, part);
  for (const auto& part : model.parts) expect_same_part(file, part, records.at(part.name)[i]);
  for (const auto& [name, tensor] : model.outside) expect_same_tensor(saved.first.tensors, name, tensor, tensor.sizes());
  for (const auto& [name, tensor] : model.buffers) expect_same_tensor(file.tensors, name, tensor, tensor.sizes());
}

OptimizerState read_optimizer_state(const Saved& saved, const torch::nn::Module& model, const Communicator& world) {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(model)) parameters[name] = parameter;
  OptimizerState result;
  for (const auto& name : saved.own.front().tensors.names()) {
    if (!name.starts_with(kOptimizerPrefix)) continue;
    const auto rest = name.substr(std::string_view(kOptimizerPrefix).size());
    const auto dot = rest.rfind('.');
    if (dot == std::string::npos) continue;
    auto values = saved.read(name);
    auto& state = result[rest.substr(0, dot)][rest.substr(dot + 1)];
    const auto parameter = parameters.find(rest.substr(0, dot));
    state = parameter == parameters.end() ? values.front() : state_of_ranks(std::move(values), parameter->second, world);
  }
  return result;
}

Saved open(const fs::path& folder, const Contents& contents, const LocalValues& model, const Records& records, const Communicator& world) {
  if (const int ranks = saved_ranks(folder); ranks != world.size()) {
    throw UsageError(fmt::format(
        "{} was saved by {} ranks, here are {}; start {} ranks, or make one file of it: tessera ckpt consolidate --ckpt-prefix {}",
        folder.string(), ranks, world.size(), ranks, folder.string()));
  }
  Saved saved{.own = {}, .first = open_rank_file(folder, 0, world.size())};
  for (const int rank : world.local_ranks()) {
    saved.own.push_back(open_rank_file(folder, rank, world.size()));
    expect_same_save(saved.first, saved.own.back());
  }
  for (size_t i = 0; i < saved.own.size(); i++) expect_same_model(folder, model, records, saved, i);
  const auto& own = saved.own.front();
  verify(saved);
  saved.generator = own.tensors.read(kGeneratorName);
  expect_generator_state(saved.generator, own.tensors.path());
  if (!contents.optimizer) return saved;
  if (const auto kind = contents.optimizer.class_name(); kind != own.record.optimizer) {
    throw UsageError(fmt::format("the checkpoint {} {}, but is loaded into a {}", folder.string(),
                                 own.record.optimizer.empty() ? "has no optimizer" : "is of a " + own.record.optimizer, kind));
  }
  saved.optimizer = read_optimizer_state(saved, *contents.model, world);
  contents.optimizer.expect_state(*contents.model, saved.optimizer);
  return saved;
}

/// Throws DisagreementError on all ranks unless all of them have opened files of the same save.
void expect_one_save(const RankFile& file, const fs::path& folder, const Communicator& world) {
  const auto number = static_cast<int64_t>(file.record.save);
  const auto range = at::tensor({number, -number}, at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.all_reduce(range, {.op = Reduce::Max}, {.unit = "checkpoint"}).wait();
  const auto most = range[0].item<int64_t>(), least = -range[1].item<int64_t>();
  if (most == least) return;
  throw DisagreementError(fmt::format(
      "ranks load different checkpoints, this one {}; give all of them the same folder, and keep it where all see the same files. "
      "Nothing was changed",
      folder.string()));
}

void copy_values(const Saved& saved, const torch::nn::Module& module, std::span<const std::shared_ptr<Unit>> units, const Records& records,
                 const Communicator& world) {
  const WriteGuard guard(units, WriteKind::Load);
  const auto model = local_values(module);  // only now, because the guard may have moved shards into other memory
  for (const auto& part : model.parts) part.values.copy_(tensor_of_ranks(saved.read(part.name), part.values, records.at(part.name), world));
  for (const auto& [name, tensor] : model.outside) tensor.copy_(saved.first.tensors.read(name));
  for (const auto& [name, tensor] : model.buffers) {
    tensor.copy_(tensor_of_ranks(saved.read(name), tensor, whole_records(tensor.sizes(), world), world));
  }
}

}  // namespace

void load(const fs::path& folder, Contents& contents, const Communicator& world) {
  expect_idle("checkpoint::load");
  expect_model(contents);
  const c10::AutoGradMode no_grad(false);
  const auto model = local_values(*contents.model);
  const auto records = all_records(model);
  std::optional<Saved> saved;
  AllOrNone step;
  step.attempt([&] { saved.emplace(open(folder, contents, model, records, world)); });
  step.expect_all(world, {.unit = "checkpoint"}, fmt::format("can't load {}; nothing was changed", folder.string()));
  expect_one_save(saved->first, folder, world);
  if (contents.optimizer) contents.optimizer.load_state(*contents.model, saved->optimizer);
  copy_values(*saved, *contents.model, model.units, records, world);
  set_generator_state(saved->generator);
  contents.notes = {};
  for (const auto& [name, text] : saved->own.front().record.notes) contents.notes[name] = text;
}

}  // namespace tessera::checkpoint
