// checkpoint::save: chooses the format, and replaces an earlier checkpoint when the new one is complete.
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/format_table.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/live/live_run.h"
#include "tessera/checkpoint/live/save.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/simulation.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/weight_forms.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPiece = 1 << 22;  // bytes of a tensor that are copied at once: few enough to stay in the cache until they are written

/// Throws UsageError for contents that the format can't hold.
void expect_place(const Contents& contents, const SaveOptions& options) {
  const auto& row = row_of(options.format);
  const auto format = row.name;
  if (contents.base) throw UsageError("a checkpoint that refers to a base needs Tessera's format, not {}", format);
  if (options.keep || options.in_place)
    throw UsageError("SaveOptions::{} is for Tessera's format, not for {}", options.keep ? "keep" : "in_place", format);
  const bool has_tensors = !contents.tensors.empty() || !contents.tensors_by_rank.empty();
  if (row.model_alone) {
    if (contents.optimizer || has_tensors || contents.notes.begin() != contents.notes.end())
      throw UsageError("{} holds the model alone; leave out the optimizer, notes and extra tensors", format);
  } else if (!row.takes_extra && has_tensors) {
    const auto& tensors = contents.tensors.empty() ? contents.tensors_by_rank : contents.tensors;
    throw UsageError("{} has no place for the extra tensor '{}'; save in another format", format, tensors.begin()->first);
  }
}

void expect_replaceable(const fs::path& folder) {
  if (!is_there(folder) || is_accelerate_folder(folder)) return;
  if (const auto names = names_in(folder); names && names->empty()) return;
  throw UsageError("{} is there already, and is not a folder of Accelerate's; save under another name", folder);
}

/// Throws UsageError for adapters and quantized weights, which readers of a format for whole models would misread.
void expect_whole_model(ConstModuleRef model, Format format) {
  if (!row_of(format).model_alone) return;
  if (!adapters().describe(model).empty()) {
    throw UsageError(
        "the model has adapters, and {} has no place for them; write the adapters with checkpoint::save_adapter, and a model with "
        "merged adapters with checkpoint::merge_adapter",
        name_of(format));
  }
  const auto forms = local_values(*model).forms;
  if (forms.empty()) return;
  throw UsageError("'{}' is held as {}, for which {} has no place; save it in Tessera's format", forms.begin()->first,
                   forms.begin()->second->name, name_of(format));
}

/// Saves in a format other than Tessera's.
void save_as(const fs::path& given, const Contents& contents, const Communicator& world, const SaveOptions& options) {
  const auto path = link_target(lasting_name(given));  // a link stays, and its target is replaced
  auto out = path;
  const ConvertOptions how{.to = options.format,
                           .world = world.size(),
                           .weights_only = row_of(options.format).model_alone,
                           .max_shard_size = options.max_shard_size,
                           .accelerate_layout = options.accelerate_layout,
                           .notes_of_first_rank = true,
                           .memory = kPiece};
  const auto failure = fmt::format("could not save {}; what was there is unchanged", path.string());
  const auto together = [&](c10::function_ref<void()> act) { all_or_none(world, {.unit = "checkpoint"}, failure, act); };
  const bool is_accelerates = options.format == Format::Accelerate;
  std::optional<NamedLock> lock;  // for the folder to replace; set in the process of rank 0
  together([&] {
    if (path.empty()) throw UsageError("a checkpoint needs a folder; this name is empty");
    expect_storable(path, options.format);
    expect_writable_as(path, options.format);
    expect_place(contents, options);
    expect_whole_model(*contents.model, options.format);
    if (!is_accelerates || !world.is_first()) return;
    lock.emplace(lock_place(path));
    recover_folder(path);
  });
  together([&] {
    if (!is_accelerates) return;
    expect_replaceable(path);
    out = beside(path, ".new");
  });
  const auto number = expect_savable(path, contents, world, options, failure);
  std::vector<RankContents> own;
  together([&] {
    auto all = contents;
    if (contents.optimizer) all.notes[kSettingsNote] = contents.optimizer.settings(*contents.model);
    own = contents_of_ranks(number, all, world);
    if (out != path && world.is_first()) remove_tree(out);  // left by a program that was killed
  });
  auto live = live_run(own, world, failure);
  together([&] { expect_no_blocks(live.run); });
  const RunSource source(std::move(live), how, world, failure, fmt::format("could not save {}", path.string()));
  row_of(options.format).write(source, out);
  source.end_on_first([&] {
    if (out != path) replace_folder(path, out);
    for (const auto& [name, why] : source.left_out())
      log(LogLevel::Warning, "{} is saved without the note '{}': {}", path, printable(name), why);
  });
}

}  // namespace

void save(const fs::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options) try {
  const Calling calling("checkpoint::save");
  if (Simulation::current() != nullptr) return;  // a dry run leaves no files
  const c10::AutoGradMode no_grad(false);
  if (options.format != Format::Tessera) return save_as(folder, contents, world, options);
  Save save(folder, contents, world, options);
  const auto together = [&](const std::string& failure, c10::function_ref<void()> act) {
    all_or_none(world, {.unit = "checkpoint"}, failure, act);
  };
  try {
    together(save.failure(), [&] { save.write(contents_of_ranks(save.number(), contents, world), [] {}); });
    together(save.commit_failure(), [&] { save.commit(); });
  } catch (const CommError&) {
    save.abandon();
    throw;
  }
} catch (...) {
  throw;  // unwinds, and so removes unfinished files, even if no caller catches: without this handler, the program would end first
}

}  // namespace tessera::checkpoint
