// Saves and loads the state of a Trainer.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/train/report.h"
#include "tessera/train/trainer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Returns the name with a number, as Accelerate numbers its files: "scheduler", "scheduler_1".
std::string numbered(const char* name, size_t number) {
  return number == 0 ? name : fmt::format("{}_{}", name, number);
}

// The ends of the names of notes: Accelerate's own count, which is processes times steps, and Tessera's counts in addition.
constexpr auto kLastEpoch = ".last_epoch", kSteps = ".tessera_steps", kStepSize = ".tessera_samples_of_a_step",
               kCount = ".tessera_last_epoch";  // Accelerate's count at the time of kSteps

std::string registered_name(size_t number) {
  return fmt::format("custom_checkpoint_{}.state", number);
}

/// Returns the folder of a model: of several models, each has its own.
fs::path folder_of_model(const fs::path& folder, size_t model, size_t models) {
  return models == 1 ? folder : folder / fmt::format("model_{}", model);
}

/// Returns how many processes have saved a folder of Accelerate or Tessera, as far as the names of its files tell.
int processes_of(const fs::path& folder) {
  constexpr std::string_view kStates = "random_states_";
  int64_t files = 0, last = 0;
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    files += checkpoint::has_rank_file_name(name) ? 1 : 0;
    if (name.starts_with(kStates)) last = std::max(last, train::leading_number(name.substr(kStates.size())).value_or(0) + 1);
  }
  return static_cast<int>(std::max({int64_t{1}, files, last}));
}

/// Returns the steps for a count of Accelerate's, which counts each step once for each process. The optimizer's own count of steps tells
/// how many processes there were, even if files of some processes are missing.
int64_t steps_of(int64_t count, int processes, const fs::path& folder) {
  if (const auto own = checkpoint::steps_of_optimizer(folder); own > 0 && count % own == 0) return own;
  return count / processes;
}

/// Throws IoError for a file that exists, but from which nothing could be read. Otherwise the state in that file would begin anew without
/// notice.
void expect_read(const fs::path& folder, const std::string& file, const checkpoint::Notes& notes) {
  const auto beginning = fs::path(file).stem().string() + ".";
  const auto is_of_file = [&](const auto& note) { return note.first.starts_with(beginning); };
  if (!is_there(folder / file) || std::ranges::any_of(notes, is_of_file)) return;
  throw IoError("{} is damaged, or has nothing that can be read (tessera ckpt inspect says why); remove it to resume without it",
                folder / file);
}

bool is_saved_model(const fs::path& folder) {
  try {
    const auto format = checkpoint::format_of(folder);
    return format == checkpoint::Format::Accelerate || format == checkpoint::Format::Tessera;
  } catch (const Error&) {  // it is not a checkpoint at all
    return false;
  }
}

/// Whether there is a folder that is not empty. Throws UsageError for a file.
bool has_something(const fs::path& folder) {
  if (!is_there(folder)) return false;
  if (!is_folder(folder)) throw UsageError("{} is a file; save_state makes a folder", folder);
  const auto names = names_in(folder);
  return names && !names->empty();
}

/// Throws UsageError if the folder has contents that are not an earlier save.
void expect_replaceable(const fs::path& folder) {
  if (!has_something(folder) || is_saved_model(folder)) return;
  const auto names = names_in(folder);
  const auto is_model = [&](const std::string& name) { return name.starts_with("model_") && is_saved_model(folder / name); };
  if (std::ranges::all_of(*names, is_model)) return;
  throw UsageError("{} is there already, and was not saved by save_state; save under another name", folder);
}

template <class T>
std::optional<T> note_in(const checkpoint::Notes& notes, const std::string& name) {
  return notes.contains(name) ? std::optional(notes.at(name).as<T>()) : std::nullopt;
}

/// Returns the saved position as a position of this loader, even if batches had another size then. Nothing if Tessera has saved no
/// position.
std::optional<data::Position> position_in(const checkpoint::Notes& notes, size_t number, data::Loader& loader) {
  const auto name = numbered("dl_state_dict", number);
  const auto position = note_in<data::Position>(notes, name + ".position");
  if (!position) return std::nullopt;
  if (const auto order = note_in<std::string>(notes, name + ".order"); order.value_or(loader.order()) != loader.order()) {
    throw UsageError(
        "the run was saved with a loader of {}, and this one is of {}: samples would come in another order; make them the same", *order,
        loader.order());
  }
  if (const auto data = note_in<std::string>(notes, name + ".data"); data && !loader.data().empty() && *data != loader.data()) {
    throw UsageError("the run was saved with other data: a loader of {}, and this one is of {}; give it the same, or begin anew", *data,
                     loader.data());
  }
  if (note_in<int64_t>(notes, name + ".batches") == position->batch) {
    // The epoch was over, so it does not matter how its last batch was filled.
    if (const auto batches = loader.batches_of_epoch(position->epoch)) return data::Position{.epoch = position->epoch, .batch = *batches};
    return data::Position{.epoch = position->epoch + 1};
  }
  return loader.place_of(*position, note_in<int64_t>(notes, name + ".global_batch").value_or(loader.global_batch()));
}

}  // namespace

/// The name of a note begins with the file in which Accelerate keeps the same state. State that all models share is saved with the first one.
checkpoint::Notes Trainer::notes_of(size_t model) const {
  checkpoint::Notes notes = {{"step", steps()}};
  const auto& own = models_[model].optimizers;
  for (size_t i = 0; i < own.size(); i++) {
    const auto& optimizer = optimizers_[own[i]];
    const auto name = numbered("scheduler", i);
    std::vector<double> rates;
    for (const auto& group : json::parse(checkpoint::OptimizerRef(optimizer.optimizer).settings(*models_[model].module))) rates.push_back(group.at("lr"));
    notes[name + kLastEpoch] = optimizer.steps * world_.size();  // Accelerate lets a scheduler step once for each process
    notes[name + "._step_count"] = optimizer.steps * world_.size() + 1;
    notes[name + "._last_lr"] = json(rates).dump();
    // Some schedulers of torch expect the state of functions when they are loaded. Tessera has none, so saves an empty one.
    notes[name + ".lr_lambdas"] = json(std::vector<std::nullptr_t>(rates.size())).dump();
    notes[name + "._scale_fn_custom"] = "null";
    notes[name + kSteps] = optimizer.steps;
    notes[name + kCount] = optimizer.steps * world_.size();
    if (!loaders_.empty()) notes[name + kStepSize] = loaders_.front()->global_batch();
  }
  if (model > 0) return notes;
  for (size_t i = 0; i < loaders_.size(); i++) {
    const auto name = numbered("dl_state_dict", i);
    auto& loader = *loaders_[i];
    notes[name + ".position"] = loader.position();
    notes[name + ".global_batch"] = loader.global_batch();
    if (const auto batches = loader.batches()) notes[name + ".batches"] = *batches;
    notes[name + ".order"] = loader.order();
    if (!loader.data().empty()) notes[name + ".data"] = loader.data();
  }
  for (size_t i = 0; i < registered_.size(); i++) notes[registered_name(i)] = registered_[i].save();
  if (scaler_.options().enabled) {
    notes["scaler.scale"] = scaler_.get_scale();
    notes["scaler.growth_factor"] = scaler_.options().growth_factor;
    notes["scaler.backoff_factor"] = scaler_.options().backoff_factor;
    notes["scaler.growth_interval"] = scaler_.options().growth_interval;
    notes["scaler._growth_tracker"] = scaler_.growth_tracker();
  }
  return notes;
}

Trainer::Resumed Trainer::read_notes(size_t model, const checkpoint::Notes& notes, const fs::path& folder) const {
  const int processes = processes_of(folder);
  Resumed resumed;
  const auto remark = [&](std::string_view text) {
    if (is_main_process()) tessera::log(LogLevel::Warning, "load_state: {}", text);
  };
  for (size_t i = 0; i < models_[model].optimizers.size(); i++) {
    const auto name = numbered("scheduler", i);
    const auto number = [&](const char* of) { return note_in<int64_t>(notes, name + of); };
    const int64_t total = number(kLastEpoch).value_or(-1);
    // If a program of Accelerate has continued the run, Accelerate's count is higher, but Tessera's older notes are still in the file.
    const auto is_ours = [&](int64_t steps) {
      if (const auto count = number(kCount)) return total == *count;
      return total < 0 || total == steps * processes || total == steps;
    };
    if (const auto own = number(kSteps); own && is_ours(*own)) {
      resumed.steps.push_back(*own);
      const auto then = number(kStepSize).value_or(0), now = loaders_.empty() ? 0 : loaders_.front()->global_batch();
      if (then == now || then == 0 || now == 0) continue;
      auto& steps = resumed.steps.back();
      const auto before = std::exchange(steps, data::batches_before(steps * then, now));
      remark(fmt::format("{} with batches of {} on all ranks together count as {} with batches of {}", counted(before, "step"), then, steps,
                         now));
    } else if (total >= 0) {
      const auto steps = steps_of(total, processes, folder);
      resumed.steps.push_back(steps);
      remark(
          fmt::format("{}.bin counts {} for {} processes, which are {} steps", name, total, steps == 0 ? processes : total / steps, steps));
    } else {
      resumed.steps.push_back(0);
      remark(fmt::format("there is no {}.bin, so steps and the learning rate begin anew", name));
    }
  }
  for (size_t i = 0; i < resumed.steps.size(); i++) {
    const auto& optimizer = optimizers_[models_[model].optimizers[i]];
    if (optimizer.scheduled > resumed.steps[i]) {
      throw UsageError("torch's scheduler has taken {} and can't go back to step {}; load before the first step",
                       counted(optimizer.scheduled, "step"), resumed.steps[i]);
    }
  }
  if (model > 0) return resumed;
  for (size_t i = 0; i < loaders_.size(); i++) resumed.positions.push_back(position_in(notes, i, *loaders_[i]));
  if (std::ranges::any_of(resumed.positions, [](const auto& position) { return !position; }))
    remark("some loader of this program has no saved position, so such loaders stay where they are");
  for (size_t i = 0; i < registered_.size(); i++) {
    const auto state = note_in<std::string>(notes, registered_name(i));
    if (!state) {
      throw UsageError("the saved run has no custom_checkpoint_{}.pkl of a program of Tessera, but this program has registered {}", i,
                       counted(static_cast<int64_t>(registered_.size()), "object"));
    }
    resumed.states.push_back(*state);
  }
  if (notes.contains(registered_name(registered_.size()))) {
    throw UsageError(
        "the run that was saved had more objects registered than the {} of this one; register the same ones, in the same order",
        registered_.size());
  }
  if (!scaler_.options().enabled) return resumed;
  if (notes.contains("scaler.scale")) {
    resumed.scaler.emplace(optim::GradScalerOptions{.init_scale = notes.at("scaler.scale").as<double>(),
                                                    .growth_factor = notes.at("scaler.growth_factor").as<double>(),
                                                    .backoff_factor = notes.at("scaler.backoff_factor").as<double>(),
                                                    .growth_interval = notes.at("scaler.growth_interval").as<int64_t>()},
                           notes.at("scaler._growth_tracker").as<int64_t>());
  } else {
    remark("there is no scaler.pt, so the scale of gradients begins anew");
  }
  return resumed;
}

void Trainer::resume(size_t model, Resumed resumed) {
  const auto& own = models_[model].optimizers;
  for (size_t i = 0; i < own.size(); i++) {
    optimizers_[own[i]].steps = std::max<int64_t>(resumed.steps[i] - 1, 0);
    take_rate(optimizers_[own[i]]);  // the rate of the last step, as the saved run had it
    optimizers_[own[i]].steps = resumed.steps[i];
    follow_steps(optimizers_[own[i]]);
  }
  for (size_t i = 0; i < resumed.positions.size(); i++) {
    if (resumed.positions[i]) loaders_[i]->seek(*resumed.positions[i]);
  }
  for (size_t i = 0; i < resumed.states.size(); i++) registered_[i].load(resumed.states[i]);
  if (resumed.scaler) scaler_ = std::move(*resumed.scaler);
}

checkpoint::Contents Trainer::contents_of(size_t model) const {
  checkpoint::Contents contents{.model = models_[model].module.get()};
  for (const auto number : models_[model].optimizers) contents.optimizer = {contents.optimizer, optimizers_[number].optimizer};
  contents.base = models_[model].base;
  contents.average = models_[model].average;
  return contents;
}

void Trainer::refer_to_base(const std::string& name) {
  if (models_.size() != 1) throw UsageError("Trainer::refer_to_base is for one model, but {} are prepared", models_.size());
  if (settings_.saves_for_accelerate()) return;  // checkpoints of Accelerate are always whole
  models_[0].base = checkpoint::base_of(*models_[0].module, name);
}

checkpoint::Contents Trainer::contents() const {
  if (models_.size() != 1)
    throw UsageError("Trainer::contents is of one model, but {} are prepared; save_state saves several", models_.size());
  expect_between_steps("contents");
  auto contents = contents_of(0);
  contents.notes = notes_of(0);
  return contents;
}

void Trainer::expect_between_steps(std::string_view function) const {
  if (models_.empty()) throw UsageError("Trainer::{} was called before prepare() was given a model", function);
  if (syncs_) return;
  throw UsageError(
      "Trainer::{} was called in the middle of an accumulation, whose gradients would be lost; save where sync_gradients() is true, after "
      "step()",
      function);
}

void Trainer::save_model(size_t model, const fs::path& folder, checkpoint::Notes notes) {
  const auto& type = settings_.text("fsdp_state_dict_type");
  auto contents = contents_of(model);
  contents.notes = std::move(notes);
  if (!settings_.saves_for_accelerate()) {
    checkpoint::save(folder, contents, world_);
  } else {
    using Layout = checkpoint::AccelerateLayout;
    const auto layout = settings_.text("distributed_type") != "FSDP" ? Layout::Replicated
                        : type == "FULL_STATE_DICT"                  ? Layout::Full
                                                                     : Layout::Sharded;
    checkpoint::save(folder, contents, world_, {.format = checkpoint::Format::Accelerate, .accelerate_layout = layout});
  }
}

void Trainer::save_state(const fs::path& given) {
  expect_between_steps("save_state");
  if (given.empty()) throw UsageError("Trainer::save_state was given an empty path");
  const auto folder = link_target(given);  // a link stays, and its target is replaced
  const bool is_stored = object_path(folder).has_value();
  const auto made = is_stored ? folder : beside(folder, ".new");  // in an object store, nothing is replaced
  std::vector<checkpoint::Notes> notes;
  std::optional<NamedLock> lock;  // held only by the main process
  all_or_none(world_, {.unit = "save_state"}, fmt::format("could not save {}; what was there is unchanged", folder.string()), [&] {
    for (size_t i = 0; i < models_.size(); i++) notes.push_back(notes_of(i));
    if (!is_main_process()) return;
    if (!is_stored) lock.emplace(lock_place(folder));
    recover_folder(folder);
    if (is_stored) return;
    expect_replaceable(folder);
    fs::remove_all(made);  // left by a program that was killed
  });
  for (size_t i = 0; i < models_.size(); i++) save_model(i, folder_of_model(made, i, models_.size()), std::move(notes[i]));
  if (is_stored) return;
  all_or_none(world_, {.unit = "save_state"}, fmt::format("could not replace {} by the new save, which is {}", folder.string(), made.string()), [&] {
    if (is_main_process()) replace_folder(folder, made);
  });
}

bool Trainer::has_state(const fs::path& folder) const {
  bool has_names = false;
  all_or_none(world_, {.unit = "has_state"}, fmt::format("can't look at {}", folder.string()), [&] {
    if (is_main_process()) recover_folder(link_target(folder));
  });
  all_or_none(world_, {.unit = "has_state"}, fmt::format("can't look at {}", folder.string()), [&] { has_names = has_something(folder); });
  return has_names;
}

void Trainer::load_state(const fs::path& folder) {
  if (models_.empty()) throw UsageError("Trainer::load_state was called before prepare() was given a model");
  if (folder.empty()) throw UsageError("Trainer::load_state was given an empty path");
  all_or_none(world_, {.unit = "load_state"}, fmt::format("can't load {}", folder.string()), [&] {
    if (!is_main_process()) return;
    recover_folder(link_target(folder));
    if (is_there(folder) && !has_something(folder)) throw UsageError("the folder {} is empty; save_state fills it", folder);
    const auto first = folder_of_model(folder, 0, models_.size());
    if (!is_there(first) && !checkpoint::is_complete(first))  // a store may list it late
      throw UsageError("there is no {} to load; save_state of {} makes it", first, counted(static_cast<int64_t>(models_.size()), "model"));
  });
  for (size_t i = 0; i < models_.size(); i++) {
    const auto place = folder_of_model(folder, i, models_.size());
    auto contents = contents_of(i);
    Resumed resumed;
    const auto look = [&](const checkpoint::Notes& notes) {
      for (size_t k = 0; k < models_[i].optimizers.size(); k++) expect_read(place, numbered("scheduler", k) + ".bin", notes);
      if (i == 0) {  // the state that all models share
        for (size_t k = 0; k < loaders_.size(); k++) expect_read(place, numbered("dl_state_dict", k) + ".bin", notes);
        for (size_t k = 0; k < registered_.size(); k++) expect_read(place, fmt::format("custom_checkpoint_{}.pkl", k), notes);
        if (scaler_.options().enabled) expect_read(place, "scaler.pt", notes);
      }
      resumed = read_notes(i, notes, place);
    };
    checkpoint::load(place, contents, world_, {.optimizer_by_numbers = true, .notes_of_first_rank = true, .expect = look});
    resume(i, std::move(resumed));
  }
  batches_ = 0;
  syncs_ = true;
  log_.reset();  // steps may be done again
  log_from_ = steps() + 1;
  resumed_ = true;
}

}  // namespace tessera
