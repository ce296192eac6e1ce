// The flags common to all recipes.
#pragma once

#include <fmt/format.h>
#include <tessera/base/error.h>
#include <tessera/cli/run_flags.h>

#include <CLI/CLI.hpp>
#include <cstdint>
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
  app.add_option("--seed", flags.seed, seeded)->capture_default_str();
  app.add_option("--num-workers", flags.workers, "Threads that prepare batches; 0 for none")
      ->capture_default_str()
      ->check(from_to(0, 1000));
  tessera::cli::add_run_flags(app, flags.run, flags.metrics);
}
