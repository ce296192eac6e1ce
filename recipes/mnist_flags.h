// The command line of the MNIST recipe.
#pragma once

#include <filesystem>
#include <string>

#include "recipe_flags.h"

struct Flags : ExampleFlags {
  Flags() { run = {.epochs = 2, .save_epochs = false}; }  // the recipe itself saves, where buffers are the same on all ranks

  std::filesystem::path datadir = "/usr/share/datasets/fashion-mnist";
  bool replicated = false;
  double lr = 0.02, momentum = 0.5;
};

inline void declare(CLI::App& app, Flags& flags) {
  app.add_option("--datadir", flags.datadir, "Folder with the four IDX files of MNIST or a similar data set, plain or .gz")
      ->type_name("FOLDER")
      ->capture_default_str();
  app.add_flag("--fake-data", flags.fake_data, "Train on generated images instead of files");
  app.add_option("--lr", flags.lr, "Learning rate")->capture_default_str()->check(tessera::cli::from_to(0.0, 1000.0));
  app.add_option("--momentum", flags.momentum, "Momentum of SGD")->capture_default_str()->check(tessera::cli::from_to(0.0, 1.0));
  app.add_flag("--use-nested-fsdp", flags.nested, "Shard each convolution and linear layer as a unit of its own");
  app.add_flag("--run-without-fsdp", flags.replicated, "Do not shard: whole parameters on every rank, gradients averaged");
  app.add_flag("--use-gradient-checkpointing", flags.gradient_checkpointing,
               "Run the network again in backward instead of keeping activations");
  add_example_flags(app, flags);
  add_target_flag(app, flags);
  add_recipe_flags(app, flags, "Samples per rank and step", "Seed of the weights and of the order of samples");
  app.callback([&flags] {
    if (flags.replicated && (flags.nested || flags.flatten || flags.compute_dtype != "float32")) {
      throw tessera::ConfigError(
          "--run-without-fsdp shards nothing, so --use-nested-fsdp, --flatten-parameters and --compute-dtype can't be used with it");
    }
  });
}
