// checkpoint::load: all ranks agree that everything fits before any of them changes a value.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numeric>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/live/beside.h"
#include "tessera/checkpoint/live/contents.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/training_state.h"
#include "tessera/checkpoint/stored/optimizer_keys.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Returns the names of the model and, for state that identifies parameters by number, the names in each group of the optimizer.
ModelNames known_names(const LocalValues& model, const Contents& contents, const LoadOptions& options) {
  auto names = names_of(model, options.may_be_missing);
  if (!contents.optimizer || !options.optimizer_by_numbers) return names;
  for (const auto& group : nlohmann::json::parse(contents.optimizer.settings(*contents.model))) names.groups.push_back(group.at("params"));
  return names;
}

/// An opened checkpoint that fits `contents`. The constructor changes no value of the run.
struct Saved {
  Saved(const fs::path& folder, const Contents& contents, const RowsOfRanks& rows, ModelPlan& plan, const LoadOptions& options,
        const Communicator& world)
      : manifest(read_run(folder, known_names(plan.values(), contents, options))), stored(manifest.catalog) {
    const auto where = "the checkpoint " + folder.string();
    plan.fit(source_of(stored), options, where, names_in_base(folder, contents, options),
             [&](const std::string& name) { return is_of_model(name, manifest); });
    const int rank = world.local_ranks().front();
    for (const auto& [name, text] : notes_of_rank(manifest, rank, world.size(), options)) notes[name] = text;
    if (options.expect) options.expect(notes);
    expect_beside(contents, rows, manifest, options, folder.string());
    if (contents.optimizer) expect_class(folder, contents.optimizer);
    if (const auto& faults = manifest.catalog.faults; !faults.empty()) throw IoError(faults.front());
    std::vector<int> all(static_cast<size_t>(world.size()));
    std::iota(all.begin(), all.end(), 0);
    verify_share(stored, world, all);
    generator = read_generator(stored, manifest, rank);
    device_generator = read_device_generator(stored, manifest, rank, device_with_generator(world));
    if (contents.optimizer) training.emplace(contents, manifest, stored, plan.elsewhere(), options, world, where);
  }

  /// Returns the names of the parameters that are in the checkpoint's base instead of the checkpoint. Throws UsageError unless the model
  /// has the same adapters and the same base.
  const std::set<std::string>& names_in_base(const fs::path& folder, const Contents& contents, const LoadOptions& options) const {
    expect_adapters(folder, adapters().describe(*contents.model), options);
    const auto& base = manifest.base;
    if (base.parameters.empty()) return base.parameters;
    const auto needs =
        fmt::format("the checkpoint {} holds only the trained parameters; the others are in its base, {}", folder.string(), base.name);
    if (!contents.base) throw UsageError("{}: load the base first, and give Contents::base = checkpoint::base_of(model, name)", needs);
    expect_unchanged(*contents.model, *contents.base);
    for (const auto& [name, parameter] : named_parameters(*contents.model)) {
      const bool trains = parameter.requires_grad();
      if (trains != base.parameters.contains(name) || (!trains && !contents.base->parameters.contains(name))) continue;
      throw UsageError("{}, but '{}', which {} in that run, {} here", needs, name, trains ? "is frozen" : "trains",
                       trains ? "trains" : "is frozen");
    }
    if (contents.base->forms != base.forms) {
      const auto held = [](const std::string& forms) { return forms.empty() ? "as they are" : "as " + forms; };
      throw UsageError("{}, with weights held {}, but here they are held {}", needs, held(base.forms), held(contents.base->forms));
    }
    if (contents.base->checksum != base.checksum) {
      throw UsageError("{} (checksum {}), but the base here, {}, has other values (checksum {})", needs, base.checksum, contents.base->name,
                       contents.base->checksum);
    }
    return base.parameters;
  }

  void expect_adapters(const fs::path& folder, const std::string& here, const LoadOptions& options) const {
    const auto& there = manifest.adapters;
    const bool may_differ = there.empty() ? !options.may_be_missing.empty() : here.empty() && !options.may_be_unknown.empty();
    if (here == there || may_differ) return;
    const auto named = [](const std::string& adapters) { return adapters.empty() ? "none" : adapters; };
    throw UsageError("the checkpoint {} has these adapters: {}; and the model here: {}", folder, named(there), named(here));
  }

  void expect_class(const fs::path& folder, const OptimizerRef& here) const {
    const auto& there = manifest.optimizer;
    if (!there.empty() && is_same_rule(there, here.class_name())) return;
    auto what = there.empty() ? "has no optimizer" : "is of a " + there;
    const auto state = manifest.catalog.left_out.find("optimizer.state");
    const bool is_usable = !there.empty() && state == manifest.catalog.left_out.end();
    if (state != manifest.catalog.left_out.end()) what = "has state of an optimizer that can't be used, because " + state->second;
    if (const auto around = folder.parent_path(); there.empty() && is_accelerate_folder(around))
      what += fmt::format(" (did you mean {}?)", around.string());
    throw UsageError("the checkpoint {} {}, but is loaded into a {}; {}load only the model (--weights, load_weights)", folder, what,
                     here.class_name(), is_usable ? "take its optimizer (--optimizer), or " : "");
  }

  Manifest manifest;
  CatalogReader stored;
  Notes notes;
  std::optional<at::Generator> generator;
  at::Tensor device_generator;  // the state of the device's generator
  std::optional<SavedState> training;
};

/// Throws DisagreementError on all ranks unless all of them have opened the same save.
void expect_one_save(const Manifest& manifest, const fs::path& folder, const Communicator& world) {
  if (same_on_all(world, manifest.save, {.unit = "checkpoint"})) return;
  throw DisagreementError(
      "ranks load different checkpoints, this rank {}; give all ranks the same folder, and keep it where all see the same files. "
      "Nothing was changed",
      folder);
}

}  // namespace

void load(const fs::path& folder, Contents& contents, const Communicator& world, const LoadOptions& options) {
  const OuterCall call("checkpoint::load");
  expect_model(contents);
  ModelPlan plan(*contents.model, world, {.unit = "checkpoint"}, folder.string(), [&] { expect_loadable_beside(contents); });
  const auto rows = rows_of_ranks(contents, world);
  std::optional<Saved> saved;
  plan.together([&] { saved.emplace(folder, contents, rows, plan, options, world); });
  expect_one_save(saved->manifest, folder, world);
  AllOrNone reading;
  reading.attempt([&] {
    if (saved->training) saved->training->load();
  });
  reading.attempt([&] { plan.load(); });
  reading.attempt([&] { load_beside(contents, rows, saved->manifest, saved->stored, world); });
  plan.expect_finished(reading);
  if (saved->generator) set_generator(at::kCPU, saved->generator->get_state());
  if (saved->device_generator.defined()) set_generator(device_with_generator(world), saved->device_generator);
  contents.notes = std::move(saved->notes);
}

}  // namespace tessera::checkpoint
