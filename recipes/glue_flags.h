// The command line of the recipe for pairs of sentences.
#pragma once

#include <filesystem>
#include <optional>

#include "recipe_flags.h"

struct Flags : RecipeFlags {
  Flags() { run.epochs = 3; }

  std::filesystem::path model, data, output;
  bool fake_data = false;
  int64_t max_length = 128;
  std::optional<double> lr;
};

inline void declare(CLI::App& app, Flags& flags) {
  app.add_option("--model", flags.model,
                 "Hugging Face folder of a BERT: config.json, weights and vocab.txt. Without it, a small new BERT is trained")
      ->type_name("FOLDER");
  app.add_option("--data", flags.data, "Folder with the train.tsv and dev.tsv of MRPC in GLUE, or files like them")->type_name("FOLDER");
  app.add_flag("--fake-data", flags.fake_data, "Train on generated pairs instead of files");
  app.add_option("--lr", flags.lr, "Highest learning rate; by default 2e-5, or 2e-3 without --model")
      ->check(tessera::cli::from_to(0.0, 1000.0));
  app.add_option("--max-length", flags.max_length, "Greatest number of tokens in a pair of sentences; longer pairs are cut")
      ->capture_default_str()
      ->check(tessera::cli::from_to(3, 1'000'000));
  app.add_option("--output", flags.output, "Where to write the trained model, as a Hugging Face folder")->type_name("FOLDER");
  add_target_flag(app, flags);
  add_recipe_flags(app, flags, "Pairs per rank and step", "Seed of new weights, of dropout and of the order of pairs");
  app.callback([&flags] {
    if (flags.fake_data == !flags.data.empty())
      throw tessera::ConfigError("give either --data FOLDER, with train.tsv and dev.tsv, or --fake-data");
  });
}
