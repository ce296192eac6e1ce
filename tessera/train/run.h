// Run: does the work of a training program around its loop: resumes from the newest checkpoint, saves, stops on signals, reports, and shows
// progress. The program still writes the loop itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/prune.h"
#include "tessera/data/loader.h"
#include "tessera/train/trainer.h"
#include "tessera/train/value.h"

namespace tessera::train {

struct RunOptions {
  /// The length of the whole run, including the part before it was resumed. `epochs` or `steps` must be given; with both, the run ends at
  /// the limit that is reached first. With 0, nothing is trained.
  std::optional<int64_t> epochs = {}, steps = {};
  /// Checkpoints are PREFIX-step-N after N steps, in Tessera's format. If a run resumes with larger batches, in which the steps so far are
  /// fewer, N continues from the checkpoint's. While the run exists, no other job can save under the same prefix. Without a prefix, nothing
  /// is saved.
  std::filesystem::path prefix = {};
  bool resume = false;       // resumes from the newest checkpoint, if there is one; a job restarted by `tessera launch` always resumes
  bool save_epochs = true;   // saves at the end of each epoch
  int64_t save_every = 0;    // also saves after each so many steps; 0: does not
  bool save_beside = false;  // saves by AsyncSaver, while training continues
  std::optional<checkpoint::Keep> keep = {};  // which older checkpoints to keep; all of them unless given
  int64_t report_every = 20;                  // in steps; if no step of an epoch is due, its last step is reported
  int64_t evaluate_every = 0;                 // in steps: Run::should_evaluate(); 0: only at the end of an epoch
  int64_t patience = 0;  // ends the run after so many evaluations in a row without a better value; 0: does not
  /// A folder for a trace of what each rank does in its batches 4 to 8, or to the end of the epoch; see train::Profile.
  std::filesystem::path trace = {};
  /// Signals that end the run after the present step, with a checkpoint: the signal of Ctrl-C, and those that batch systems send before a
  /// job's time is up. Without a prefix, signals keep their usual effect.
  std::vector<int> signals = {SIGINT, SIGTERM, SIGUSR1};
};

/// A number of one rank's batch, such as the mean loss of its samples. It is left out if `value` is undefined.
struct Measured {
  std::string name;
  at::Tensor value;
  /// The number of things, such as tokens, of which `value` is the mean: the report is the mean over the things of all ranks and of all
  /// passes of a step. Unless given, all passes have the same weight, and each rank has its Samples::weight, as in Trainer::backward.
  at::Tensor of = {};
};

/// A run with one model, whose optimizers and loader the Trainer has prepared. All ranks call the same functions in the same order.
class Run {
 public:
  /// Throws ConfigError if there are checkpoints and the run is not to resume, or if another job saves under the prefix. If bytes of the
  /// newest checkpoint are damaged, resumes from the checkpoint before it, with a warning. Collective.
  Run(Trainer& trainer, data::Loader& loader, RunOptions options);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run();

  /// Begins an epoch, or continues the epoch in which the run was saved. Returns false if no epoch is left or the run was stopped; then all
  /// checkpoints are on the disk. Collective.
  bool next_epoch();
  /// The number of the present epoch, from 1 on.
  int64_t epoch() const { return epoch_; }

  /// The remaining batches of the epoch: for (auto& batch : run.batches()). Saves between two batches, and at the end. Collective.
  class Batches;
  Batches batches();

  /// Whether the present batch ends a step that is reported. Other batches need not compute costly numbers.
  bool is_due() const { return is_due_ && trainer_.sync_gradients(); }
  /// Called after Trainer::step() for each batch. If the batch ends a step that is reported, averages the numbers over all ranks and over
  /// the batches of the step, logs them with lr, memory (of rank 0), samples_per_second and mfu, unless they have these names, and shows
  /// their means over ten reports. Ignores numbers of other steps. Collective.
  void report(const std::vector<Measured>& numbers);
  /// Prints a line on rank 0, above the bar if there is one.
  void say(std::string_view line);

  /// Whether the program should evaluate after this batch: at the end of a step that RunOptions::evaluate_every selects, of the epoch or of
  /// the run. Called after Trainer::step(). Collective.
  bool should_evaluate();
  /// Called with the metrics of an evaluation after the present batch, the same on all ranks. Logs them, and makes them notes of the step's
  /// checkpoint. Returns whether the metric Keep::metric, or else the first one, is the best of the run so far, including the part before
  /// it was resumed; then Keep::best saves a checkpoint. Collective.
  bool evaluated(const Values& metrics);
  /// The checkpoint of the best evaluation, if Keep::best keeps it. Collective.
  std::optional<std::filesystem::path> best_checkpoint() const;

  /// Saves a checkpoint in addition to those of the options, unless no step was taken since the last checkpoint. Metrics and the numbers
  /// that were reported last become notes, by which Keep::best chooses. Warns if this run has already saved the step without the metrics.
  /// Collective.
  void save(const Values& metrics = {});
  /// The checkpoint that was saved or loaded last.
  const std::optional<std::filesystem::path>& last_checkpoint() const { return last_; }
  /// Ends the run after the present step, with a checkpoint, for example because a metric no longer improves. All ranks call it.
  void stop() { stopped_ = true; }
  /// Whether a signal or stop() has ended the run. A resumed run then continues in the same epoch.
  bool stopped() const { return stopped_; }

 private:
  friend class data::BatchIterator<Run>;
  struct Parts;

  void go_on();
  /// For a run that has nothing to resume from. Warns if its folder has checkpoints with other prefixes, because the prefix may be
  /// mistyped.
  void say_that_it_begins_anew();
  /// Loads the checkpoint or, if it is damaged, the newest earlier one that is not.
  void load(const std::filesystem::path& newest);
  bool is_over() const;
  bool is_out_of_patience() const { return options_.patience > 0 && since_best_ >= options_.patience; }
  /// How many batches of the present size the samples before Position::first count as.
  int64_t before_first() const;
  bool saves_at(bool end_of_epoch) const;
  std::optional<data::Samples> next();
  data::Loop loop() { return loader_.loop(); }
  void batch_done();
  void end_trace();
  void add(const std::vector<Measured>& numbers);
  void look_for_signals();

  Trainer& trainer_;
  data::Loader& loader_;
  const RunOptions options_;
  std::unique_ptr<Parts> parts_;
  std::optional<std::filesystem::path> last_;
  int64_t epoch_ = 0, saved_step_ = -1, steps_before_ = 0;
  std::optional<double> best_;  // the best value of an evaluation
  int64_t best_step_ = 0, since_best_ = 0;  // the number of that checkpoint, and how many evaluations did not improve it
  int64_t steps_more_ = 0;  // added to Trainer::steps() in the names of checkpoints
  bool is_in_batch_ = false, is_due_ = false, stopped_ = false, has_saved_ = false;
  bool has_reported_ = false;  // whether a step of this epoch was reported
};

class Run::Batches {
 public:
  data::BatchIterator<Run> begin() { return data::BatchIterator(run_); }
  std::default_sentinel_t end() { return {}; }

 private:
  friend class Run;
  explicit Batches(Run& run) : run_(run) {}
  Run& run_;
};

inline Run::Batches Run::batches() {
  return Batches(*this);
}

}  // namespace tessera::train
