#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/contents.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/model_plan.h"
#include "tessera/checkpoint/optimizer_state.h"
#include "tessera/checkpoint/rank_file.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/write_guard.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Throws IoError if bytes are damaged. Each rank looks at the files of some ranks, its own first of all.
void verify(const CatalogReader& stored, const Communicator& world) {
  for (const auto& bytes : stored.catalog().checksums) {
    const auto rank = static_cast<int>(bytes.file % static_cast<size_t>(world.size()));
    if (std::ranges::find(world.local_ranks(), rank) != world.local_ranks().end()) stored.verify(bytes);
  }
}

/// The state of the generator that this rank has had, or of one that no other rank has if there were fewer ranks. Throws IoError if the
/// state is none: libtorch would notice only when it is set.
at::Generator read_generator(const CatalogReader& stored, const Manifest& manifest, int rank) {
  const auto& info = stored.info(kGeneratorName);
  const auto state = at::empty(info.shape, info.dtype);
  const auto file = first_file(stored, rank);
  stored.read(kGeneratorName, whole_slice(info.shape), state, file);
  auto generator = at::detail::createCPUGenerator();
  try {
    generator.set_state(state);
  } catch (const std::exception& error) {
    throw IoError(
        fmt::format("the state of the random generator in {} is damaged: {}", stored.catalog().files[file].string(), first_line(error)));
  }
  if (rank >= manifest.ranks) {
    const auto drawn = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
    generator.set_current_seed(drawn + static_cast<uint64_t>(rank));
  }
  return generator;
}

/// The notes that this rank has made; on another number of ranks, those on which all ranks agree.
Notes read_notes(const Manifest& manifest, int rank, const Communicator& world, const LoadOptions& options) {
  const bool has_own = manifest.ranks == world.size();
  const auto& own = manifest.notes.at(has_own ? static_cast<size_t>(rank) : 0);
  Notes notes;
  for (const auto& [name, text] : own) {
    const auto differs = [&](const auto& others) {
      const auto other = others.find(name);
      return other == others.end() || other->second != text;
    };
    if (!has_own && !options.notes_of_first_rank && std::ranges::any_of(manifest.notes, differs)) {
      throw UsageError(
          fmt::format("the {} ranks that saved had different notes '{}', and here are {} ranks; load with "
                      "{{.notes_of_first_rank = true}} if those of rank 0 are right for all",
                      manifest.ranks, name, world.size()));
    }
    notes[name] = text;
  }
  return notes;
}

std::set<std::string> names_in_model(const Manifest& manifest) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : manifest.catalog.tensors) {
    if (name != kGeneratorName && !is_optimizer_state(name, manifest)) names.insert(name);
  }
  return names;
}

/// A checkpoint that has been opened and checked. Nothing has been changed yet.
struct Saved {
  Saved(const fs::path& folder, const Contents& contents, const LocalValues& model, const LoadOptions& options, const Communicator& world)
      : manifest(read_manifest(folder)),
        stored(manifest.catalog),
        plan(stored, names_in_model(manifest), model, options, "the checkpoint " + folder.string()) {
    const int rank = world.local_ranks().front();
    notes = read_notes(manifest, rank, world, options);
    if (contents.optimizer) expect_class(folder, contents.optimizer);
    verify(stored, world);
    generator = read_generator(stored, manifest, rank);
    if (!contents.optimizer) return;
    optimizer = read_optimizer_state(manifest, stored, *contents.model, world);
    contents.optimizer.expect_state(*contents.model, optimizer);
  }

  void expect_class(const fs::path& folder, const OptimizerRef& here) const {
    if (here.class_name() == manifest.optimizer) return;
    throw UsageError(fmt::format("the checkpoint {} {}, but is loaded into a {}", folder.string(),
                                 manifest.optimizer.empty() ? "has no optimizer" : "is of a " + manifest.optimizer, here.class_name()));
  }

  Manifest manifest;
  CatalogReader stored;
  ModelPlan plan;
  Notes notes;
  at::Generator generator;
  std::map<std::string, optim::ParameterState> optimizer;
};

/// Throws DisagreementError on all ranks unless all of them have opened the same save.
void expect_one_save(const Manifest& manifest, const fs::path& folder, const Communicator& world) {
  if (same_on_all(world, manifest.save, {.unit = "checkpoint"})) return;
  throw DisagreementError(fmt::format(
      "ranks load different checkpoints, this one {}; give all of them the same folder, and keep it where all see the same files. "
      "Nothing was changed",
      folder.string()));
}

}  // namespace

void load(const fs::path& folder, Contents& contents, const Communicator& world, const LoadOptions& options) {
  expect_idle("checkpoint::load");
  expect_model(contents);
  const c10::AutoGradMode no_grad(false);
  const auto model = local_values(*contents.model);
  std::optional<Saved> saved;
  AllOrNone step;
  step.attempt([&] { saved.emplace(folder, contents, model, options, world); });
  step.expect_all(world, {.unit = "checkpoint"}, fmt::format("can't load {}; nothing was changed", folder.string()));
  expect_one_save(saved->manifest, folder, world);
  if (contents.optimizer)
    load_optimizer_state(contents.optimizer, saved->optimizer, saved->manifest, saved->stored, *contents.model, world);
  {
    const WriteGuard guard(model.units, WriteKind::Load);
    saved->plan.load(local_values(*contents.model), world);  // asked again, because the guard may have moved shards into other memory
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(saved->generator.get_state());
  }
  contents.notes = std::move(saved->notes);
}

}  // namespace tessera::checkpoint
