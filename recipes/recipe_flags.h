// The flags that all recipes have.
#pragma once

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
  std::vector<std::string> metrics;
};

/// `batch` tells what --batch-size counts, and `seeded` what follows from the seed.
inline void add_recipe_flags(CLI::App& app, RecipeFlags& flags, const std::string& batch, const std::string& seeded) {
  using tessera::cli::from_to;
  app.add_option("--batch-size", flags.batch_size, batch)->capture_default_str()->check(from_to(1, 1'000'000));
  app.add_option("--seed", flags.seed, seeded)->capture_default_str();
  app.add_option("--num-workers", flags.workers, "Threads that prepare batches; 0 for none")
      ->capture_default_str()
      ->check(from_to(0, 1000));
  tessera::cli::add_run_flags(app, flags.run, flags.metrics);
}
