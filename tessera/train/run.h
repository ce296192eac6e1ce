// Run: the work of a training program around its loop. It resumes from the last checkpoint, saves, stops when told to, reports, and shows
// progress. The loop stays the program's.
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
  /// Of the whole run, with the part before it was resumed. One of them must be given; with both, the one that is reached first ends the
  /// run.
  std::optional<int64_t> epochs = {}, steps = {};
  /// Checkpoints are PREFIX-step-N, in Tessera's format. While the run exists, no other job can save under the same prefix. Without a
  /// prefix, nothing is saved.
  std::filesystem::path prefix = {};
  bool resume = false;       // from the newest checkpoint, if there is one; a job that launch has restarted does so in any case
  bool save_epochs = true;   // at the end of each
  int64_t save_every = 0;    // steps between two more checkpoints; 0 for none
  bool save_beside = false;  // by AsyncSaver, while training goes on
  std::optional<checkpoint::Keep> keep = {};  // which older ones stay; all of them unless given
  int64_t report_every = 20;                  // in steps; an epoch without a report has one of its last step
  /// A folder for a trace of what each rank does in its batches 4 to 8, or to the end of the epoch; see train::Profile.
  std::filesystem::path trace = {};
  /// Signals that end the run after the present step, with a checkpoint: Ctrl-C, and those that batch systems send before the time is up.
  /// Without a prefix they do what they do in any program.
  std::vector<int> signals = {SIGINT, SIGTERM, SIGUSR1};
};

/// A number of one rank's batch, such as the mean loss of its samples. An undefined one is left out.
struct Measured {
  std::string name;
  at::Tensor value;
  /// The count of which the value is the mean, such as the tokens that are learned: the report is the mean over the counts of all ranks and
  /// passes of a step. Unless given, passes count alike, and ranks by their samples, as for the gradients of Trainer::backward.
  at::Tensor of = {};
};

/// All ranks call the same functions in the same order. One model, with the optimizers and the loader that were prepared before.
class Run {
 public:
  /// Throws ConfigError if there are checkpoints and the run is not to resume, or if another job saves under the prefix. If bytes of the
  /// newest checkpoint are damaged, resumes from the one before, and says so. Collective.
  Run(Trainer& trainer, data::Loader& loader, RunOptions options);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  ~Run();

  /// Begins an epoch, or continues the one in which the run was saved. Returns false if there is none left or the run was stopped; then all
  /// checkpoints are on the disk. Collective.
  bool next_epoch();
  /// The number of the present epoch, from 1 on.
  int64_t epoch() const { return epoch_; }

  /// The rest of the epoch: for (auto& batch : run.batches()). Saves between two batches, and at the end. Collective.
  class Batches;
  Batches batches();

  /// Whether the present batch ends a step that is reported, for numbers that are costly.
  bool is_due() const { return is_due_ && trainer_.sync_gradients(); }
  /// Called after Trainer::step() for each batch. If the batch ends a step that is reported, averages the numbers over all ranks and over
  /// the batches of the step, logs them with the learning rate, and shows their means over ten reports. Ignores numbers of other steps.
  /// Collective.
  void report(const std::vector<Measured>& numbers);
  /// Prints a line on rank 0, above the bar if there is one.
  void say(std::string_view line);

  /// Saves a checkpoint beside those of the options, unless no step was taken since the last one. Metrics become notes, by which Keep::best
  /// chooses; so do the numbers that were reported last. Warns if this run has saved the step without the metrics. Collective.
  void save(const Values& metrics = {});
  /// The checkpoint that was saved or loaded last.
  const std::optional<std::filesystem::path>& last_checkpoint() const { return last_; }
  /// Ends the run after the present step, with a checkpoint, as when a metric gets no better. All ranks call it.
  void stop() { stopped_ = true; }
  /// Whether a signal or stop() has ended the run. If it is resumed, it continues in the same epoch.
  bool stopped() const { return stopped_; }

 private:
  friend data::BatchIterator<Run>;
  struct Parts;

  void go_on();
  /// Loads the checkpoint, or the newest before it that is not damaged.
  void load(const std::filesystem::path& newest);
  bool is_over() const;
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
  int64_t steps_more_ = 0;  // added to steps() in the names of folders
  bool is_in_batch_ = false, is_due_ = false, stopped_ = false, has_saved_ = false;
  bool has_reported_ = false;  // in this epoch
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
