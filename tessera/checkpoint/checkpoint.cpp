#include "tessera/checkpoint/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <random>
#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/base/new_file.h"
#include "tessera/checkpoint/parts.h"
#include "tessera/checkpoint/rank_file.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/write_guard.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr auto kOptimizer = "optimizer.";
constexpr auto kGenerator = "generator.cpu";
using OptimizerState = std::map<std::string, optim::ParameterState>;

/// What every rank does on its own, so that the failure of one is an error on all: its own words there, `others` elsewhere.
void together(const Communicator& world, const std::function<void()>& act, std::string_view others) {
  std::exception_ptr own;
  try {
    act();
  } catch (...) {
    own = with_context("");
  }
  const auto failed = at::full({1}, own ? world.rank() : world.size(), at::TensorOptions(world.traits().device).dtype(at::kLong));
  try {
    world.all_reduce(failed, {.op = Reduce::Min}, {.unit = "checkpoint"}).wait();
  } catch (...) {
    if (!own) throw;
  }
  if (own) std::rethrow_exception(own);
  if (const auto rank = failed.item<int64_t>(); rank < world.size()) throw IoError(fmt::format("rank {} {}", rank, others));
}

std::string kind_of(const optim::Optimizer* optimizer) {
  return optimizer != nullptr ? c10::demangle(typeid(*optimizer).name()) : "";
}

at::Tensor generator_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

void expect_model(const Contents& contents) {
  if (contents.model == nullptr) throw UsageError("a checkpoint needs a model: give Contents::model");
}

// --- saving ------------------------------------------------------------------------------------------------------------------------------

uint64_t draw_save(const Communicator& world) {
  std::random_device source;
  const auto number = at::full({1}, static_cast<int64_t>(source()), at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.broadcast(number, 0, {.unit = "checkpoint"}).wait();
  return static_cast<uint64_t>(number.item<int64_t>());
}

void write_rank_file(const fs::path& folder, uint64_t save, const Contents& contents, const Communicator& world) {
  if (!fs::is_directory(folder)) {
    throw IoError(fmt::format("the folder {} that rank 0 has made is not there for rank {}; save where all ranks see the same files",
                              folder.string(), world.rank()));
  }
  const auto model = parts_of(*contents.model);
  RankRecord record{.rank = world.rank(),
                    .ranks = world.size(),
                    .save = save,
                    .aliases = model.aliases,
                    .optimizer = kind_of(contents.optimizer),
                    .notes = contents.notes};
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& part : model.parts) {
    const PartRecord where{.sizes = part.sizes, .strides = part.strides, .begin = part.begin, .numel = part.values.numel()};
    if (!record.parts.emplace(part.name, where).second) {
      throw UsageError(fmt::format("two parameters in units of the model are called '{}'; shard the whole model last", part.name));
    }
    tensors.emplace_back(part.name, part.values);
  }
  for (const auto& [name, tensor] : model.whole) {
    if (world.rank() != 0) break;
    record.whole.push_back(name);
    tensors.emplace_back(name, tensor);
  }
  for (const auto& [name, tensor] : model.buffers) {
    record.buffers.push_back(name);
    tensors.emplace_back(name, tensor);
  }
  if (contents.optimizer != nullptr) {
    for (const auto& [name, state] : contents.optimizer->state(*contents.model)) {
      for (const auto& [key, tensor] : state) tensors.emplace_back(fmt::format("{}{}.{}", kOptimizer, name, key), tensor);
    }
  }
  tensors.emplace_back(kGenerator, generator_state());
  // The widest first: then every value lies at a multiple of its width, whoever maps the file into memory.
  std::ranges::stable_sort(tensors, std::greater{}, [](const auto& named) { return named.second.element_size(); });

  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  SafetensorsWriter writer(rank_file(folder, record.rank, record.ranks), std::move(entries), to_metadata(record));
  for (const auto& [name, tensor] : tensors) writer.write(tensor);
  writer.close();
}

/// Makes the folder that becomes the checkpoint; a left-over of a run that was killed while it saved is in the way.
void make_empty(const fs::path& part, const fs::path& folder) {
  if (fs::exists(fs::symlink_status(folder))) {
    throw IoError(fmt::format("there is a {} already; save under another name, or remove it", folder.string()));
  }
  std::error_code error;
  fs::remove_all(part, error);
  if (!error) fs::create_directories(part, error);
  if (error) throw IoError(fmt::format("can't create the folder {}: {}", part.string(), error.message()));
}

void give_name(const fs::path& part, const fs::path& folder) {
  sync_folder(part);
  std::error_code error;
  fs::rename(part, folder, error);
  if (error) throw IoError(fmt::format("can't rename {} to {}: {}", part.string(), folder.string(), error.message()));
  sync_folder(folder.parent_path());
}

// --- loading -----------------------------------------------------------------------------------------------------------------------------

/// All that load() needs of the files: checked against the model, but not in it yet.
struct Saved {
  RankFile own;
  RankFile first;  // rank 0's
  OptimizerState optimizer = {};
  at::Tensor generator = {};
};

/// Complains about names that are only on one side.
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

void expect_same_tensor(const SafetensorsFile& file, const std::string& name, const at::Tensor& here) {
  const auto& there = file.info(name);
  if (at::IntArrayRef(there.sizes) != here.sizes() || there.dtype != here.scalar_type()) {
    throw UsageError(fmt::format("'{}' is {} of [{}] in {}, but {} of [{}] in the model", name, c10::toString(there.dtype),
                                 fmt::join(there.sizes, ", "), file.path().string(), c10::toString(here.scalar_type()),
                                 fmt::join(here.sizes(), ", ")));
  }
}

void expect_same_parameter(const RankFile& file, const Part& part) {
  const auto& there = file.record.parts.at(part.name);
  const auto where = file.tensors.path().string();
  if (there.sizes != part.sizes) {
    throw UsageError(fmt::format("'{}' has the shape [{}] in {}, but [{}] in the model", part.name, fmt::join(there.sizes, ", "), where,
                                 fmt::join(part.sizes, ", ")));
  }
  if (there.strides != part.strides) {
    throw UsageError(fmt::format(
        "'{}' lies in memory with the strides [{}] in {}, but [{}] in the model; give it the same memory format before it is sharded",
        part.name, fmt::join(there.strides, ", "), where, fmt::join(part.strides, ", ")));
  }
}

void expect_same_part(const RankFile& file, const Part& part) {
  const auto& there = file.record.parts.at(part.name);
  const auto where = file.tensors.path().string();
  if (there.begin != part.begin || there.numel != part.values.numel()) {
    throw UsageError(fmt::format(
        "of '{}' {} has {} values from {} on, this rank of the model {} from {} on; shard the model as it was when it was saved", part.name,
        where, there.numel, there.begin, part.values.numel(), part.begin));
  }
  expect_same_tensor(file.tensors, part.name, part.values);
}

OptimizerState read_optimizer_state(const SafetensorsFile& file) {
  OptimizerState result;
  for (const auto& name : file.names()) {
    if (!name.starts_with(kOptimizer)) continue;
    const auto rest = name.substr(std::string_view(kOptimizer).size());
    const auto dot = rest.rfind('.');
    if (dot == std::string::npos) continue;
    result[rest.substr(0, dot)][rest.substr(dot + 1)] = file.read(name);
  }
  return result;
}

Saved open(const fs::path& folder, const Contents& contents, const ModelParts& model, const Communicator& world) {
  if (const int ranks = saved_ranks(folder); ranks != world.size()) {
    throw UsageError(fmt::format(
        "{} was saved by {} ranks, here are {}; start {} ranks, or make one file of it: tessera ckpt consolidate --ckpt-prefix {}",
        folder.string(), ranks, world.size(), ranks, folder.string()));
  }
  Saved saved{.own = open_rank_file(folder, world.rank(), world.size()), .first = open_rank_file(folder, 0, world.size())};
  const auto& own = saved.own;
  expect_same_save(saved.first, own);
  std::map<std::string, const Part*> parts;
  for (const auto& part : model.parts) parts[part.name] = &part;
  expect_same_names(folder, "sharded parameter", names_of(own.record.parts), names_of(parts));
  expect_same_names(folder, "unsharded parameter", saved.first.record.whole, names_of(model.whole));
  expect_same_names(folder, "buffer", own.record.buffers, names_of(model.buffers));
  // Parameters of other shapes also move the parts of all others: they are the news.
  for (const auto& part : model.parts) expect_same_parameter(own, part);
  for (const auto& part : model.parts) expect_same_part(own, part);
  for (const auto& [name, tensor] : model.whole) expect_same_tensor(saved.first.tensors, name, tensor);
  for (const auto& [name, tensor] : model.buffers) expect_same_tensor(own.tensors, name, tensor);
  saved.generator = own.tensors.read(kGenerator);
  if (contents.optimizer == nullptr) return saved;
  if (const auto kind = kind_of(contents.optimizer); kind != own.record.optimizer) {
    throw UsageError(fmt::format("the checkpoint {} {}, but is loaded into a {}", folder.string(),
                                 own.record.optimizer.empty() ? "has no optimizer" : "is of a " + own.record.optimizer, kind));
  }
  saved.optimizer = read_optimizer_state(own.tensors);
  return saved;
}

void copy_values(const Saved& saved, const ModelParts& model) {
  const WriteGuard guard(model.units, Write::Load);
  for (const auto& part : model.parts) part.values.copy_(saved.own.tensors.read(part.name));
  for (const auto& [name, tensor] : model.whole) tensor.copy_(saved.first.tensors.read(name));
  for (const auto& [name, tensor] : model.buffers) tensor.copy_(saved.own.tensors.read(name));
}

}  // namespace

void save(const fs::path& folder, const Contents& contents, const Communicator& world) {
  expect_model(contents);
  const fs::path part = folder.string() + ".part";
  const auto others = fmt::format("could not save {}; nothing of it was kept", folder.string());
  const c10::AutoGradMode no_grad(false);
  const auto number = draw_save(world);
  try {
    together(
        world,
        [&] {
          if (world.rank() == 0) make_empty(part, folder);
        },
        others);
    together(
        world, [&] { write_rank_file(part, number, contents, world); }, others);
    together(
        world,
        [&] {
          if (world.rank() == 0) give_name(part, folder);
        },
        others);
  } catch (const CommError&) {
    throw;  // others may still be writing
  } catch (...) {
    std::error_code ignored;
    if (world.rank() == 0) fs::remove_all(part, ignored);
    throw;
  }
}

void load(const fs::path& folder, Contents& contents, const Communicator& world) {
  expect_model(contents);
  const c10::AutoGradMode no_grad(false);
  const auto model = parts_of(*contents.model);
  std::optional<Saved> saved;
  together(
      world, [&] { saved = open(folder, contents, model, world); }, fmt::format("can't load {}; nothing was changed", folder.string()));
  // The only one that may still refuse, and it does so on all ranks alike.
  if (contents.optimizer != nullptr) contents.optimizer->load_state(*contents.model, saved->optimizer);
  copy_values(*saved, model);
  set_generator_state(saved->generator);
  contents.notes = saved->own.record.notes;
}

void expect_usable(const fs::path& prefix) {
  if (!prefix.has_filename()) {
    throw UsageError(fmt::format("the prefix {} is a folder; add what the names of checkpoints in it shall begin with", prefix.string()));
  }
  const fs::path trial = prefix.string() + "-trial.part";
  make_empty(trial, trial);
  fs::remove(trial);
}

fs::path step_folder(const fs::path& prefix, int64_t step) {
  return fmt::format("{}-step-{:06}", prefix.string(), step);
}

bool is_complete(const fs::path& folder) {
  try {
    return saved_ranks(folder) > 0;
  } catch (const IoError&) {
    return false;
  }
}

std::optional<fs::path> latest(const fs::path& prefix) {
  const auto parent = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  const auto start = prefix.filename().string() + "-step-";
  std::optional<fs::path> newest;
  int64_t newest_step = -1;
  std::error_code error;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (!name.starts_with(start)) continue;
    int64_t step = -1;
    const auto* const last = name.data() + name.size();
    const auto [stop, wrong] = std::from_chars(name.data() + start.size(), last, step);
    if (wrong != std::errc() || stop != last || step <= newest_step) continue;
    newest = prefix.parent_path() / name;
    newest_step = step;
  }
  // What lacks files is not passed over in silence: a run would go on from an older one, and meet this one's name again.
  if (newest) saved_ranks(*newest);
  return newest;
}

}  // namespace tessera::checkpoint
