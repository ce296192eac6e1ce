// The flags that all programs with a train::Run have.
#pragma once

#include <string>
#include <vector>

#include "tessera/checkpoint/prune.h"
#include "tessera/cli/flags.h"
#include "tessera/train/reporters.h"
#include "tessera/train/run.h"

namespace tessera::cli {

/// Adds flags that set `run` and `metrics`. The values that `run` has now are the defaults; `metrics` is for TrainerOptions::log_with.
inline void add_run_flags(CLI::App& app, train::RunOptions& run, std::vector<std::string>& metrics) {
  app.add_option("--num-epochs", run.epochs, "How often to go through the training set")
      ->default_str(run.epochs ? std::to_string(*run.epochs) : "")
      ->check(from_to(0, 1'000'000));
  app.add_option("--max-steps", run.steps, "End after so many steps, even within an epoch")->check(from_to(1, 1'000'000'000));
  app.add_option("--ckpt-prefix", run.prefix,
                 "Save after every epoch, as P-step-N after N steps; in a resumed run, N continues from the checkpoint's")
      ->type_name("P");
  app.add_flag("--resume", run.resume, "Resume from the newest checkpoint under the prefix, if there is one")->needs("--ckpt-prefix");
  app.add_option("--save-steps", run.save_every, "Also save every so many steps")->check(from_to(1, 1'000'000'000))->needs("--ckpt-prefix");
  app.add_flag("--save-beside", run.save_beside, "Continue training while a checkpoint is written")->needs("--ckpt-prefix");
  app.add_option_function<int>(
         "--keep", [&run](int last) { (run.keep ? *run.keep : run.keep.emplace()).last = last; }, "How many of the newest checkpoints to keep")
      ->check(from_to(1, 1'000'000))
      ->needs("--ckpt-prefix");
  app.add_option("--log-steps", run.report_every,
                 "After every so many steps, report the loss and other numbers: to the progress bar, and to --metrics")
      ->capture_default_str()
      ->check(from_to(1, 1'000'000));
  app.add_option("--metrics", metrics,
                 "Where to write the numbers of each report: FILE.jsonl, a folder for TensorBoard, mlflow:FOLDER, or prometheus:PORT; may be repeated")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->each([](const std::string& name) { train::report_format(name); });
}

}  // namespace tessera::cli
