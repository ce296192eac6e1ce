// The command line of the MNIST recipe.
#pragma once

#include <filesystem>
#include <string>

#include "recipe_flags.h"

struct Flags : RecipeFlags {
  Flags() { run = {.epochs = 2, .save_epochs = false}; }  // saved when buffers are the same on all ranks

  std::filesystem::path datadir = "/usr/share/datasets/fashion-mnist";
  bool fake_data = false, drop_last = false, nested = false, replicated = false, flatten = false, no_consolidation = false;
  bool gradient_checkpointing = false;
  double lr = 0.02, momentum = 0.5;
  std::string compute_dtype = "float32";
};

inline void declare(CLI::App& app, Flags& flags) {
  app.add_option("--datadir", flags.datadir, "Folder with the four IDX files of MNIST or a set like it, plain or .gz")
      ->type_name("FOLDER")
      ->capture_default_str();
  app.add_flag("--fake-data", flags.fake_data, "Generated images instead of files");
  app.add_option("--lr", flags.lr, "Learning rate")->capture_default_str()->check(tessera::cli::from_to(0.0, 1000.0));
  app.add_option("--momentum", flags.momentum, "Of SGD")->capture_default_str()->check(tessera::cli::from_to(0.0, 1.0));
  app.add_flag("--drop-last", flags.drop_last, "Leave out the samples that fill no batch, instead of filling it with others");
  app.add_flag("--use-nested-fsdp", flags.nested, "Shard each convolution and linear layer as a unit of its own");
  app.add_flag("--run-without-fsdp", flags.replicated, "Whole parameters on every rank, gradients averaged");
  app.add_flag("--flatten-parameters", flags.flatten, "One vector per unit in place of a shard per parameter");
  app.add_flag("--use-gradient-checkpointing", flags.gradient_checkpointing,
               "Run the network again in backward instead of keeping activations");
  app.add_option("--compute-dtype", flags.compute_dtype, "What parameters are computed with")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"float32", "bfloat16", "float16"}));
  app.add_flag("--no-ckpt-consolidation", flags.no_consolidation, "Do not put the last checkpoint together and evaluate it at the end");
  add_target_flag(app, flags);
  add_recipe_flags(app, flags, "Samples per rank and step", "Of the weights and of the order of samples");
  app.callback([&flags] {
    if (flags.replicated && (flags.nested || flags.flatten || flags.compute_dtype != "float32")) {
      throw tessera::ConfigError(
          "--run-without-fsdp shards nothing, so --use-nested-fsdp, --flatten-parameters and --compute-dtype mean nothing to it");
    }
  });
}
