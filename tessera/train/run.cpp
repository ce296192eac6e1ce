#include "tessera/train/run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/launcher.h"
#include "tessera/base/log.h"
#include "tessera/base/storage.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/prefix_lock.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/simulation.h"
#include "tessera/train/memory.h"
#include "tessera/train/meters.h"
#include "tessera/train/profile.h"
#include "tessera/train/progress.h"
#include "tessera/train/rate.h"
#include "tessera/train/stop_signal.h"
#include "tessera/train/utilisation.h"

namespace tessera::train {

namespace {

constexpr int64_t kReportsShown = 10;  // reports of which a mean is shown; without a terminal, also the reports from one line to the next
constexpr int64_t kFirstTraced = 4, kLastTraced = 8;  // the first batches prepare much that others do not

constexpr auto kBest = "run.best", kBestStep = "run.best_step", kSinceBest = "run.since_best";  // notes

void expect_sensible(const RunOptions& options) {
  if (!options.epochs && !options.steps) throw UsageError("RunOptions has neither epochs nor steps, so the run would never end; give one of them");
  if (options.epochs.value_or(0) < 0 || options.steps.value_or(0) < 0 || options.save_every < 0 || options.report_every < 1 ||
      options.evaluate_every < 0 || options.patience < 0) {
    throw UsageError(
        "RunOptions has {} epochs, {} steps, a save every {}, a report every {} steps, an evaluation every {} and a patience of {}; "
        "choose numbers from 0 on, and for reports from 1 on",
        options.epochs.value_or(0), options.steps.value_or(0), options.save_every, options.report_every, options.evaluate_every,
        options.patience);
  }
  if (options.keep) checkpoint::expect_sensible(*options.keep);
  const bool saves = options.resume || options.save_every > 0 || options.keep;
  if (options.prefix.empty() && saves)
    throw UsageError("RunOptions asks for checkpoints, but has no prefix; give RunOptions::prefix, under which they are saved");
}

at::ScalarType dtype_of_products(const Trainer& trainer) {
  const auto& precision = trainer.settings().text("mixed_precision");
  return precision == "bf16" ? at::kBFloat16 : precision == "fp16" ? at::kHalf : at::kFloat;
}

/// A dry run neither saves nor resumes.
RunOptions without_files(RunOptions options) {
  if (Simulation::current() != nullptr) options.prefix.clear();
  return options;
}

}  // namespace

struct Run::Parts {
  /// The sum of a number over the batches of a step.
  struct Sum {
    at::Tensor values, of = {};
    int64_t batches = 0;
  };
  std::optional<checkpoint::PrefixLock> lock;
  std::optional<checkpoint::AsyncSaver> saver;
  std::optional<StopSignal> stop;
  std::optional<Progress> progress;
  std::optional<Profile> profile;
  int64_t batches = 0, batches_before = 0;  // in all, and before the present step
  Utilisation utilisation;
  Rate rate;  // of batches
  std::map<std::string, Sum> sums;
  std::map<std::string, RunningMean> means;
  Values shown, reported, evaluated;

  explicit Parts(const Trainer& trainer) : utilisation(trainer.world(), dtype_of_products(trainer)) {}
};

Run::Run(Trainer& trainer, data::Loader& loader, RunOptions options)
    : trainer_(trainer), loader_(loader), options_(without_files(std::move(options))), parts_(std::make_unique<Parts>(trainer)) {
  expect_sensible(options_);
  if (!trainer.has_prepared(loader))
    throw UsageError("Run was given a loader that the Trainer did not prepare, so its position would not be saved; pass it to Trainer::prepare");
  trainer.lr();  // throws where no optimizer was prepared
  if (options_.prefix.empty()) return;
  trainer.contents();  // throws if it can't save what is prepared
  parts_->lock.emplace(options_.prefix, trainer_.world());
  if (!options_.signals.empty()) parts_->stop.emplace(trainer_.world(), StopOptions{.signals = options_.signals});
  if (options_.save_beside) parts_->saver.emplace(trainer_.world());
  go_on();
}

Run::~Run() = default;

void Run::go_on() {
  const auto newest = checkpoint::latest(options_.prefix, trainer_.world());
  const bool resumes = options_.resume || restart_count() > 0;
  if (!newest) {
    if (const auto prefix = checkpoint::prefix_of(options_.prefix); prefix && is_folder(options_.prefix)) {
      throw ConfigError("{} is a checkpoint; to resume from it, give its prefix: --ckpt-prefix {}", options_.prefix, prefix->string());
    }
    const auto damaged = std::ssize(checkpoint::step_folders(options_.prefix));
    if (resumes && damaged > 0) {
      throw ConfigError("none of {} under {} can be loaded, for the reasons above; remove or rename them to start anew",
                        counted(damaged, "checkpoint"), options_.prefix);
    }
    if (resumes && trainer_.is_main_process()) say_that_it_begins_anew();
    return;
  }
  if (!resumes) {
    throw ConfigError("there is a {} already; resume from it (RunOptions::resume, --resume), or save under another prefix (--ckpt-prefix)",
                      newest->string());
  }
  load(*newest);
  say(fmt::format("resuming from {}", last_->string()));
}

void Run::say_that_it_begins_anew() {
  const auto& prefix = options_.prefix;
  const auto folder = prefix.has_parent_path() ? prefix.parent_path() : std::filesystem::path(".");
  auto others = checkpoint::prefixes_in(folder);
  if (others.empty())
    return say(
        fmt::format("no checkpoint {}-step-N yet, and none of another prefix in {}; starting anew", prefix.string(), folder.string()));
  const auto given = prefix.filename().string();
  const auto nearest = nearest_name(given, others);
  const auto meant = nearest.empty() ? "" : fmt::format("; did you mean --ckpt-prefix {}?", (prefix.parent_path() / nearest).string());
  std::ranges::stable_sort(others, {}, [&](const std::string& other) { return edit_distance(given, other); });
  log(LogLevel::Warning,
      "there is no checkpoint {}-step-N to resume from, so the run starts anew, but {} has checkpoints with the prefixes {}{}", prefix,
      folder, some_of(others), meant);
}

void Run::load(const std::filesystem::path& newest) {
  const auto& world = trainer_.world();
  std::vector<std::pair<std::filesystem::path, std::string>> damaged;  // damaged checkpoints, and the reasons
  auto folder = newest;
  while (true) {
    try {
      trainer_.load_state(folder);
      break;
    } catch (const IoError& error) {
      const auto advice = fmt::format("; to resume from the checkpoint before, remove or rename {}", folder.string());
      std::optional<std::string> why;
      try {
        why = checkpoint::damage_in(folder, world);
      } catch (const IoError& unreadable) {
        throw IoError(unreadable.what() + advice);
      }
      if (!why) throw IoError(error.what() + advice);
      damaged.emplace_back(folder, *why);
    }
    const auto before = checkpoint::latest(options_.prefix, world, checkpoint::Check::Sizes, checkpoint::step_of(folder));
    if (!before) {
      throw IoError("{}; no checkpoint before {} can be loaded either: remove or rename all of them to start anew", damaged.front().second,
                    newest);
    }
    folder = *before;
  }
  // In an object store, damaged folders can't be renamed, so new folders need higher numbers than the damaged ones.
  const bool keeps_names = object_path(newest).has_value();
  all_or_none(world, {.unit = "checkpoint"}, fmt::format("can't resume from {}", folder.string()), [&] {
    if (!world.is_first()) return;
    for (const auto& [name, why] : damaged) {
      if (keeps_names) {
        log(LogLevel::Warning, "{} is damaged, so the run resumes from {}: {}", name, folder, why);
      } else {
        checkpoint::set_aside(name, why);
      }
    }
    if (!damaged.empty()) checkpoint::mend_latest(options_.prefix);
  });
  last_ = folder;
  saved_step_ = trainer_.steps();
  const auto manifest = checkpoint::read_manifest(folder);
  checkpoint::Notes notes;
  for (const auto& [name, text] : manifest.notes.front()) notes[name] = text;
  if (notes.contains(kSinceBest)) since_best_ = notes.at(kSinceBest).as<int64_t>();
  if (notes.contains(kBest)) best_ = notes.at(kBest).as<double>(), best_step_ = notes.at(kBestStep).as<int64_t>();
  // With larger batches than before, the step count is rescaled to fewer steps, but later folders must still have higher numbers.
  steps_more_ = std::max<int64_t>(checkpoint::step_of(keeps_names ? newest : folder).value() - trainer_.steps(), 0);
}

bool Run::is_over() const {
  return is_out_of_patience() || (stopped_ && trainer_.sync_gradients()) || (options_.steps && trainer_.steps() >= *options_.steps);
}

int64_t Run::before_first() const {
  return data::batches_before(loader_.position().first, loader_.global_batch());
}

bool Run::next_epoch() {
  parts_->progress.reset();
  const auto position = loader_.position();
  const auto has_ended = [&] { return is_over() || (options_.epochs && position.epoch >= *options_.epochs); };
  if (epoch_ > 0 && !has_ended()) look_for_signals();
  if (has_ended()) {
    const bool of_epochs = options_.epochs && position.epoch >= *options_.epochs;
    const bool of_steps = options_.steps && trainer_.steps() >= *options_.steps;
    if (epoch_ > 0) save();  // saves the last step of the run, if that is not saved yet
    if (is_out_of_patience() && !of_epochs && !of_steps) {
      say(fmt::format("the run has ended early, after {} that brought no better value; for more, raise --patience (RunOptions::patience)",
                      counted(since_best_, "evaluation")));
    } else if (epoch_ == 0 && last_) {
      const auto had = of_epochs ? counted(*options_.epochs, "epoch") : counted(*options_.steps, "step");
      say(fmt::format("the run has had its {}; for more, raise {}", had,
                      of_epochs ? "--num-epochs (RunOptions::epochs)" : "--max-steps (RunOptions::steps)"));
    }
    if (parts_->saver) parts_->saver->wait();
    parts_->stop.reset();  // from now on signals have their usual effect
    return false;
  }
  epoch_ = position.epoch + 1;
  is_in_batch_ = has_reported_ = false;
  parts_->utilisation.step_is_left();
  parts_->rate = {};
  const auto batches = loader_.batches();
  parts_->progress.emplace(
      ProgressOptions{.title = options_.epochs ? fmt::format("epoch {}/{}", epoch_, *options_.epochs) : fmt::format("epoch {}", epoch_),
                      .steps = batches ? before_first() + *batches : 0,
                      .start = before_first() + position.batch,
                      .items_per_step = loader_.global_batch(),
                      .line_every = kReportsShown * options_.report_every,
                      .rank = trainer_.process_index()});
  return true;
}

void Run::say(std::string_view line) {
  if (parts_->progress) return parts_->progress->say(line);
  trainer_.print(line);
}

bool Run::saves_at(bool end_of_epoch) const {
  const bool took_step = trainer_.steps() != steps_before_;  // false if gradients in float16 overflowed
  return (end_of_epoch && options_.save_epochs) || (took_step && options_.save_every > 0 && trainer_.steps() % options_.save_every == 0);
}

std::optional<data::Samples> Run::next() {
  if (std::exchange(is_in_batch_, false)) batch_done();
  if (!parts_->progress && !stopped_) throw UsageError("Run::batches was used without next_epoch(); call next_epoch() before each use");
  const bool at_end = loader_.at_end();
  if (!at_end && !is_over()) {
    steps_before_ = trainer_.steps();
    is_in_batch_ = true;
    if (trainer_.sync_gradients()) {  // the batch before has ended a step
      parts_->batches_before = parts_->batches;
      parts_->utilisation.step_begins();
    }
    parts_->batches++;
    parts_->evaluated.clear();
    if (!options_.trace.empty() && parts_->batches == kFirstTraced)
      parts_->profile.emplace(ProfileOptions{.output_trace_dir = options_.trace}, trainer_.world().record());
    auto samples = loader_.next();
    const auto step = steps_before_ + 1;
    // If no step of the epoch has been reported, its last step is due.
    is_due_ = step % options_.report_every == 0 || (!has_reported_ && (loader_.at_end() || step == options_.steps));
    return samples;
  }
  parts_->progress.reset();
  end_trace();
  if (at_end) loader_.next();  // moves the loader to the next epoch
  if (stopped_ || (is_over() && options_.save_epochs) || saves_at(/*end_of_epoch=*/true)) save();
  if (is_over() && parts_->saver) parts_->saver->wait();
  return std::nullopt;
}

void Run::batch_done() {
  parts_->progress->update(before_first() + loader_.position().batch, parts_->shown);
  if (parts_->batches == kLastTraced) end_trace();
  const bool is_counted = trainer_.sync_gradients() && parts_->utilisation.step_ended(parts_->batches - parts_->batches_before);
  if (is_counted) parts_->rate = {};
  parts_->rate.add(Rate::Time::clock::now(), parts_->batches);
  if (!trainer_.sync_gradients()) return;
  parts_->sums.clear();
  if (parts_->saver) parts_->saver->poll();
  if (loader_.at_end() || is_over()) return;  // then next() saves
  look_for_signals();
  if (!stopped_ && saves_at(/*end_of_epoch=*/false)) save();
}

void Run::end_trace() {
  if (!parts_->profile) return;
  parts_->profile->finish();
  say(fmt::format("wrote {}", parts_->profile->path().string()));
  parts_->profile.reset();
}

void Run::look_for_signals() {
  if (!parts_->stop || !parts_->stop->requested()) return;
  stopped_ = true;
  parts_->progress.reset();
  save();
  if (parts_->saver) parts_->saver->wait();
  say("stopped by a signal; continue with --resume");
}

void Run::add(const std::vector<Measured>& numbers) {
  const auto number_of = [&](const std::string& name, const at::Tensor& value) {
    if (value.numel() != 1) throw UsageError("Run::report takes single numbers, but '{}' has {} values", name, value.numel());
    return value.detach().reshape({}).to(trainer_.world().traits().device, at::kDouble);
  };
  const auto add_to = [](at::Tensor& sum, const at::Tensor& value) { sum = sum.defined() ? sum + value : value; };
  for (const auto& [name, value, of] : numbers) {
    if (std::ranges::count(numbers, name, &Measured::name) > 1) throw UsageError("Run::report was given '{}' twice", name);
    if (!value.defined()) continue;
    auto& sum = parts_->sums[name];
    if (sum.batches++ > 0 && sum.of.defined() != of.defined())
      throw UsageError("Run::report was given Measured::of for '{}' in some batches of a step, but not in all; give it in all or none", name);
    const auto number = number_of(name, value);
    if (of.defined()) {
      const auto count = number_of(name, of);
      add_to(sum.values, at::where(count == 0, at::zeros_like(number), number * count));  // the mean of 0 things is NaN
      add_to(sum.of, count);
    } else {
      const double weight = loader_.taken().weight;
      add_to(sum.values, weight == 1 ? number : number * weight);
    }
  }
}

void Run::report(const std::vector<Measured>& numbers) {
  // Only the last pass of a step tells whether it is the last step of the epoch and so due. The numbers of earlier passes are added in any
  // case.
  const bool may_be_due = !has_reported_ && !trainer_.sync_gradients();
  if (!is_due_ && !may_be_due) return;
  add(numbers);
  if (!trainer_.sync_gradients()) return;
  if (trainer_.steps() == steps_before_) {
    if (trainer_.settings().text("mixed_precision") == "fp16") return;  // gradients have overflowed; the next batch is due in place of this one
    throw UsageError("Run::report was called before Trainer::step()");
  }
  std::vector<at::Tensor> values;
  parts_->reported.clear();
  std::vector<Parts::Sum> sums;
  for (const auto& measured : numbers) {
    const auto sum = parts_->sums.extract(measured.name);
    if (sum.empty()) continue;
    sums.push_back(sum.mapped());
    values.push_back(sum.mapped().values);
    if (sum.mapped().of.defined()) values.push_back(sum.mapped().of);
    parts_->reported.push_back({.name = measured.name});
  }
  if (!values.empty()) {
    const auto means = trainer_.reduce(at::stack(values), Reduce::Mean).cpu();
    const auto* mean = means.const_data_ptr<double>();
    const auto named = std::exchange(parts_->reported, {});
    for (size_t i = 0; i < sums.size(); i++) {
      const auto sum = *mean++, of = sums[i].of.defined() ? *mean++ : static_cast<double>(sums[i].batches);
      if (of != 0) parts_->reported.push_back({.name = named[i].name, .value = sum / of});  // else the step has measured nothing
    }
  }
  has_reported_ = true;
  parts_->shown.clear();
  for (const auto& [name, value, unit] : parts_->reported)
    parts_->shown.push_back({.name = name, .value = parts_->means.try_emplace(name, kReportsShown).first->second.add(value)});
  Values own = {{.name = "lr", .value = trainer_.lr()}, memory()};
  constexpr std::string_view kRateName = "samples_per_second";
  if (const auto batches = parts_->rate.per_second()) {
    if (const auto mfu = parts_->utilisation.at(*batches)) own.push_back(*mfu);
    own.push_back({.name = std::string(kRateName), .value = *batches * static_cast<double>(loader_.global_batch())});
  }
  std::erase_if(own, [&](const Value& value) { return std::ranges::count(parts_->reported, value.name, &Value::name) > 0; });
  auto logged = parts_->reported;
  std::ranges::copy(own, std::back_inserter(logged));
  // The bar has a rate of its own.
  std::ranges::copy_if(own, std::back_inserter(parts_->shown), [&](const Value& value) { return value.name != kRateName; });
  trainer_.log(logged);
}

bool Run::should_evaluate() {
  if (!trainer_.sync_gradients()) return false;
  const bool took_step = trainer_.steps() != steps_before_;
  return loader_.at_end() || is_over() || (took_step && options_.evaluate_every > 0 && trainer_.steps() % options_.evaluate_every == 0);
}

bool Run::evaluated(const Values& metrics) {
  if (metrics.empty()) throw UsageError("Run::evaluated was given no metrics");
  const bool keeps = options_.keep && options_.keep->best > 0;
  const auto compared = keeps ? std::ranges::find(metrics, options_.keep->metric, &Value::name) : metrics.begin();
  if (compared == metrics.end())
    throw UsageError("Run::evaluated was not given '{}', by which Keep::metric chooses checkpoints", options_.keep->metric);
  trainer_.log(metrics);
  parts_->evaluated = metrics;
  const auto value = compared->value;
  const bool higher = keeps && options_.keep->higher_is_better;
  const bool improves = best_ ? (higher ? value > *best_ : value < *best_) : !std::isnan(value);
  since_best_ = improves ? 0 : since_best_ + 1;
  if (!improves && value != best_) return false;  // of equal values, the newest is kept
  best_ = value;
  best_step_ = trainer_.steps() + steps_more_;
  if (keeps) save(metrics);
  return true;
}

std::optional<std::filesystem::path> Run::best_checkpoint() const {
  if (options_.prefix.empty() || !best_) return std::nullopt;
  const auto folder = checkpoint::step_folder(options_.prefix, best_step_);
  // Ranks may see a file system differently, and all must load the same.
  const bool sees = trainer_.is_main_process() && checkpoint::is_complete(folder);
  const auto seen = at::full({}, sees ? 1.0 : 0.0, at::TensorOptions(trainer_.world().traits().device));
  return trainer_.reduce(seen).item<double>() > 0 ? std::optional(folder) : std::nullopt;
}

void Run::save(const Values& metrics) {
  if (options_.prefix.empty()) return;
  if (trainer_.steps() == saved_step_) {
    if (metrics.empty() || !has_saved_ || !trainer_.is_main_process()) return;
    return log(LogLevel::Warning,
               fmt::format("step {} was already saved, without '{}'; set save_epochs = false, so that only Run::save saves at the end of an epoch",
                           saved_step_, metrics.front().name));
  }
  checkpoint::Contents contents;
  const auto folder = checkpoint::step_folder(options_.prefix, trainer_.steps() + steps_more_);
  all_or_none(trainer_.world(), {.unit = "checkpoint"}, fmt::format("could not save {}", folder.string()),
              [&] { contents = trainer_.contents(); });
  if (best_) contents.notes[kBest] = *best_, contents.notes[kBestStep] = best_step_;
  if (since_best_ > 0) contents.notes[kSinceBest] = since_best_;
  for (const auto& values : {metrics, parts_->evaluated, parts_->reported}) {
    for (const auto& [name, value, unit] : values) {
      if (!contents.notes.contains(name)) contents.notes[name] = value;
    }
  }
  // A checkpoint without the metric counts as the worst.
  if (options_.keep && options_.keep->best > 0 && !contents.notes.contains(options_.keep->metric))
    contents.notes[options_.keep->metric] = std::nan("");
  if (parts_->saver) {
    parts_->saver->save(folder, contents, {.keep = options_.keep});
  } else {
    checkpoint::save(folder, contents, trainer_.world(), {.keep = options_.keep});
  }
  saved_step_ = trainer_.steps();
  has_saved_ = true;
  last_ = folder;
  say(fmt::format("{} {}", parts_->saver ? "saving" : "saved", folder.string()));
}

}  // namespace tessera::train
