// What a Trainer saves and loads.
#include <fmt/format.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/save_accelerate.h"
#include "tessera/train/trainer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// As Accelerate numbers its files: "scheduler", "scheduler_1".
std::string numbered(const char* name, size_t number) {
  return number == 0 ? name : fmt::format("{}_{}", name, number);
}

std::map<std::string, json> settings_for_python(const optim::Optimizer& optimizer) {
  std::map<std::string, json> settings = {{"lr", optimizer.lr()}};
  for (const auto& [name, values] : optimizer.hyperparameters()) {
    if (name == "nesterov") {
      settings[name] = values.front() != 0;
    } else {
      settings[name] = values.size() == 1 ? json(values.front()) : json(values);
    }
  }
  return settings;
}

std::map<std::string, json> settings_for_python(const torch::optim::Optimizer& optimizer) {
  const auto& options = optimizer.param_groups().front().options();
  std::map<std::string, json> settings = {{"lr", options.get_lr()}};
  const auto adam = [&](const auto& values) {
    settings["betas"] = {std::get<0>(values.betas()), std::get<1>(values.betas())};
    settings["eps"] = values.eps();
    settings["weight_decay"] = values.weight_decay();
  };
  if (const auto* const values = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) adam(*values);
  if (const auto* const values = dynamic_cast<const torch::optim::AdamOptions*>(&options)) adam(*values);
  if (const auto* const values = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    settings["momentum"] = values->momentum();
    settings["dampening"] = values->dampening();
    settings["weight_decay"] = values->weight_decay();
    settings["nesterov"] = values->nesterov();
  }
  return settings;
}

}  // namespace

/// Under the names of the files in which Accelerate keeps such things. What all models share goes with the first one.
checkpoint::Notes Trainer::notes_of(size_t model) const {
  checkpoint::Notes notes = {{"step", steps()}};
  const auto& own = models_[model].optimizers;
  for (size_t i = 0; i < own.size(); i++) {
    const auto& optimizer = optimizers_[own[i]];
    const auto name = numbered("scheduler", i);
    notes[name + ".last_epoch"] = optimizer.steps;
    notes[name + "._step_count"] = optimizer.steps + 1;
  }
  if (model > 0) return notes;
  for (size_t i = 0; i < loaders_.size(); i++) notes[numbered("dl_state_dict", i) + ".position"] = loaders_[i]->position();
  for (size_t i = 0; i < registered_.size(); i++) notes[fmt::format("custom_checkpoint_{}.state", i)] = registered_[i].save();
  if (scaler_.options().enabled) {
    notes["scaler.scale"] = scaler_.get_scale();
    notes["scaler.growth_factor"] = scaler_.options().growth_factor;
    notes["scaler.backoff_factor"] = scaler_.options().backoff_factor;
    notes["scaler.growth_interval"] = scaler_.options().growth_interval;
    notes["scaler._growth_tracker"] = scaler_.growth_tracker();
    notes["scaler.tessera"] = scaler_.save();
  }
  return notes;
}

void Trainer::take_notes(size_t model, const checkpoint::Notes& notes) {
  const auto& own = models_[model].optimizers;
  for (size_t i = 0; i < own.size(); i++) optimizers_[own[i]].steps = notes.at(numbered("scheduler", i) + ".last_epoch").as<int64_t>();
  if (model > 0) return;
  // All are read before the first one changes.
  std::vector<data::Position> positions;
  std::vector<std::string> states;
  for (size_t i = 0; i < loaders_.size(); i++)
    positions.push_back(notes.at(numbered("dl_state_dict", i) + ".position").as<data::Position>());
  for (size_t i = 0; i < registered_.size(); i++)
    states.push_back(notes.at(fmt::format("custom_checkpoint_{}.state", i)).as<std::string>());
  if (notes.contains(fmt::format("custom_checkpoint_{}.state", registered_.size()))) {
    throw UsageError(
        fmt::format("the run that was saved had more objects registered than the {} of this one; register the same ones, in the same order",
                    registered_.size()));
  }
  for (size_t i = 0; i < loaders_.size(); i++) loaders_[i]->seek(positions[i]);
  for (size_t i = 0; i < registered_.size(); i++) registered_[i].load(states[i]);
  if (scaler_.options().enabled && notes.contains("scaler.tessera"))
    scaler_ = optim::GradScaler::load(notes.at("scaler.tessera").as<std::string>());
}

void Trainer::save_state(const fs::path& folder) {
  if (models_.empty()) throw UsageError("Trainer::save_state was called before prepare() was given a model");
  const auto& type = settings_.text("fsdp_state_dict_type");
  for (size_t i = 0; i < models_.size(); i++) {
    const auto place = models_.size() == 1 ? folder : folder / fmt::format("model_{}", i);
    checkpoint::Contents contents{.model = models_[i].module.get(), .notes = notes_of(i)};
    std::map<std::string, json> settings;
    for (const auto number : models_[i].optimizers) {
      const auto& optimizer = optimizers_[number];
      contents.optimizer = {contents.optimizer, optimizer.ref()};
      if (settings.empty())
        settings = optimizer.own != nullptr ? settings_for_python(*optimizer.own) : settings_for_python(*optimizer.torch);
    }
    if (type == "LOCAL_STATE_DICT") {
      checkpoint::save(place, contents, world_);
    } else {
      checkpoint::save_accelerate(place, contents, world_, {.full_state_dict = type == "FULL_STATE_DICT", .settings = settings});
    }
  }
}

void Trainer::load_state(const fs::path& folder) {
  if (models_.empty()) throw UsageError("Trainer::load_state was called before prepare() was given a model");
  for (size_t i = 0; i < models_.size(); i++) {
    const auto place = models_.size() == 1 ? folder : folder / fmt::format("model_{}", i);
    if (!is_there(place))
      throw UsageError(fmt::format("there is no {} to load; save_state of {} models makes it", place.string(), models_.size()));
    checkpoint::Contents contents{.model = models_[i].module.get()};
    for (const auto number : models_[i].optimizers) {
      const auto& optimizer = optimizers_[number];
      contents.optimizer = {contents.optimizer, optimizer.ref()};
    }
    checkpoint::load(place, contents, world_, {.notes_of_first_rank = true});
    take_notes(i, contents.notes);
  }
  batches_ = 0;
  syncs_ = true;
}

}  // namespace tessera
