// The flags common to all recipes.
#pragma once

#include <fmt/format.h>
#include <tessera/base/env.h>
#include <tessera/base/error.h>
#include <tessera/checkpoint/consolidate.h>
#include <tessera/cli/run_flags.h>
#include <tessera/train/trainer.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

struct RecipeFlags {
  tessera::train::RunOptions run;
  int64_t batch_size = 16;
  int workers = 1;
  uint64_t seed = 42;
  double target = 0;
  std::vector<std::string> metrics;
};

/// Of recipes with the flags of PyTorch/XLA's examples.
struct ExampleFlags : RecipeFlags {
  bool fake_data = false, drop_last = false, nested = false, flatten = false, gradient_checkpointing = false, no_consolidation = false;
  std::string compute_dtype = "float32";
};

inline void add_example_flags(CLI::App& app, ExampleFlags& flags) {
  app.add_flag("--drop-last", flags.drop_last,
               "Drop the last samples of an epoch if they do not fill a batch, instead of filling it with other samples");
  app.add_flag("--flatten-parameters", flags.flatten, "One vector per unit in place of a shard per parameter");
  app.add_option("--compute-dtype", flags.compute_dtype, "The dtype in which forward and backward compute")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"float32", "bfloat16", "float16"}));
  app.add_flag("--no-ckpt-consolidation", flags.no_consolidation, "Do not consolidate the last checkpoint and evaluate it at the end");
}

/// Converts these flags to settings. Modules of `units` become units where blocks are sharded by themselves.
inline tessera::TrainerOptions options_of(const ExampleFlags& flags, bool nested, const std::string& units) {
  tessera::TrainerOptions options{.log_with = flags.metrics};
  auto& settings = options.settings;
  if (flags.compute_dtype != "float32") settings["mixed_precision"] = flags.compute_dtype == "float16" ? "fp16" : "bf16";
  if (flags.flatten) settings["fsdp_use_orig_params"] = "false";
  if (nested) settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP";
  if (nested) settings["fsdp_transformer_layer_cls_to_wrap"] = units;
  return options;
}

/// Puts the last checkpoint together as a file, and returns its name: empty if there is none, or if that is not wanted.
inline std::string consolidate(const tessera::train::Run& run, const ExampleFlags& flags, const tessera::Trainer& trainer) {
  if (!run.last_checkpoint() || flags.no_consolidation) return {};
  const auto file = tessera::checkpoint::consolidated_name(flags.run.prefix).string();
  tessera::checkpoint::consolidate(*run.last_checkpoint(), file, trainer.world());
  return file;
}

/// Adds --target-accuracy, for recipes that measure an accuracy.
inline void add_target_flag(CLI::App& app, RecipeFlags& flags) {
  app.add_option("--target-accuracy", flags.target, "In percent; if the accuracy is lower, the exit status is 21")
      ->check(tessera::cli::from_to(0.0, 100.0));
}

/// Returns the exit status for an accuracy in percent.
inline int status_of(double accuracy, const RecipeFlags& flags, tessera::train::Run& run) {
  if (accuracy >= flags.target) return 0;
  run.say(fmt::format("that is below the target of {} %", flags.target));
  return 21;
}

/// `batch` and `seeded` are the help texts of --batch-size and --seed.
inline void add_recipe_flags(CLI::App& app, RecipeFlags& flags, const std::string& batch, const std::string& seeded) {
  using tessera::cli::from_to;
  app.add_option("--batch-size", flags.batch_size, batch)->capture_default_str()->check(from_to(1, 1'000'000));
  app.add_option("--seed", flags.seed, seeded)->capture_default_str()->check(from_to(int64_t{0}, std::numeric_limits<int64_t>::max()));
  app.add_option("--num-workers", flags.workers, "Threads that prepare batches; 0 for none")
      ->capture_default_str()
      ->check(from_to(0, 1000));
  tessera::cli::add_run_flags(app, flags.run, flags.metrics);
  app.parse_complete_callback([&flags] {
    if (tessera::env("TESSERA_XLA_TRACE_ONLY")) flags.workers = 0;  // batches are for all devices, and several ahead take much memory
  });
}
