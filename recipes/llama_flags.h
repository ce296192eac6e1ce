// The command line of the recipe for language models.
#pragma once

#include <tessera/llm/packing.h>
#include <tessera/llm/units.h>

#include <filesystem>
#include <optional>
#include <string>

#include "recipe_flags.h"

struct Flags : RecipeFlags {
  Flags() { run.epochs = 1, batch_size = 4; }

  std::filesystem::path model, config, data, eval_data, output, gguf, adapter, from_adapter;
  std::string optimizer = "adamw";
  // Flags for adapters. If one is not given, the key of the configuration applies.
  std::string method;
  std::optional<std::string> quantisation, target_modules;
  std::optional<int64_t> rank;
  std::optional<double> alpha, dropout, lora_plus_ratio;
  std::string preference;
  double beta = 0.1, neftune_alpha = 0;
  bool keep_best = false;
  int64_t length = 0, rows_at_once = 0;
  double lr = 2e-5, weight_decay = 0.1, clip = 1, warmup = 0.03, z_loss = 0;
  tessera::llm::Packing packing = tessera::llm::Packing::Cut;
  std::string units = "root", gguf_code = "F16";
};

inline void declare(CLI::App& app, Flags& flags) {
  using tessera::cli::from_to;
  app.add_option("--model", flags.model, "The model to train on: a Hugging Face folder, or a GGUF file")->type_name("PATH");
  app.add_option("--config", flags.config, "Train new weights, in place of --model: a folder with config.json and tokenizer.json")
      ->type_name("FOLDER");
  app.add_option("--data", flags.data, "Tokens to train on, made by `tessera data tokenize`")->type_name("FILE")->required();
  app.add_option("--eval-data", flags.eval_data, "Tokens on which the loss is measured after each epoch")->type_name("FILE");
  app.add_option("--eval-steps", flags.run.evaluate_every, "Also measure it every so many steps")
      ->check(from_to(1, 1'000'000'000))
      ->needs("--eval-data");
  app.add_option("--patience", flags.run.patience, "End after so many measures in a row without a better one")
      ->check(from_to(1, 1'000'000))
      ->needs("--eval-data");
  app.add_option("--preference", flags.preference,
                 "Learn from pairs of a chosen and a rejected answer, by DPO, whose reference is the model before training, or ORPO")
      ->check(tessera::cli::one_of({"dpo", "orpo"}));
  app.add_option("--beta", flags.beta, "DPO: how close to the reference the model stays; ORPO: the weight of the odds ratio")
      ->capture_default_str()
      ->check(from_to(1e-9, 1e6))
      ->needs("--preference");
  app.add_option("--length", flags.length, "Tokens in a row; by default 512, or as many as the model takes")
      ->check(from_to(2, 10'000'000));
  app.add_option_function<std::string>(
         "--packing",
         [&](const std::string& name) { flags.packing = name == "whole" ? tessera::llm::Packing::Whole : tessera::llm::Packing::Cut; },
         "cut: documents follow each other, and are cut at the end of a row; whole: rows of whole documents, with padding")
      ->check(tessera::cli::one_of({"cut", "whole"}))
      ->default_str("cut");
  app.add_option("--lr", flags.lr, "Highest learning rate")->capture_default_str()->check(from_to(0.0, 1000.0));
  app.add_option("--optimizer", flags.optimizer,
                 "adamw8bit keeps moments of large parameters in eight bits: two bytes for a value, not eight")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"adamw", "adamw8bit"}));
  app.add_option("--warmup", flags.warmup, "The share of steps in which the learning rate rises; afterwards it falls like a cosine")
      ->capture_default_str()
      ->check(from_to(0.0, 1.0));
  app.add_option("--weight-decay", flags.weight_decay, "Decay of all parameters but norms and biases")->capture_default_str()->check(from_to(0.0, 1000.0));
  app.add_option("--clip", flags.clip, "Greatest norm of the gradient, to which it is scaled down; 0: no limit")
      ->capture_default_str()
      ->check(from_to(0.0, 1e9));
  app.add_option("--z-loss", flags.z_loss, "Weight of a loss that keeps scores from drifting away")->capture_default_str()->check(from_to(0.0, 1.0));
  app.add_option("--loss-rows", flags.rows_at_once,
                 "Tokens whose scores are in memory at once; 0: as many as take 32 MB, or an eighth of the head's gradient")
      ->capture_default_str()
      ->check(from_to(0, 1'000'000'000));
  app.add_option("--units", flags.units, "How embedding, norm and head are divided into units: root, apart or head-with-norm")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"root", "apart", "head-with-norm"}));
  app.add_option("--method", flags.method,
                 "full: all weights train; lora, dora: adapters train, the weights are frozen; qlora: as lora, with quantised weights. "
                 "By default, the configuration decides")
      ->check(tessera::cli::one_of({"full", "lora", "dora", "qlora"}));
  app.add_option("--rank", flags.rank, "Rank of adapters; without --method, it makes adapters, as --method lora does")->default_str("8")->check(from_to(1, 100'000));
  app.add_option("--alpha", flags.alpha, "The output of adapters is multiplied by alpha / rank")
      ->default_str("16")
      ->check(from_to(0.0, 1e6));
  app.add_option("--dropout", flags.dropout, "Dropout of the input of adapters")->default_str("0")->check(from_to(0.0, 0.999));
  app.add_option("--target-modules", flags.target_modules,
                 "The layers that get adapters, by the ends of their names: q_proj,v_proj; by default all linear layers but the head")
      ->type_name("NAMES");
  app.add_option("--quantisation", flags.quantisation, "Format of the frozen weights of qlora")
      ->default_str("nf4")
      ->check(tessera::cli::one_of({"nf4", "nf4_single", "int8", "fp8"}));
  app.add_option("--from-adapter", flags.from_adapter, "An adapter of peft from which training begins: its options are those of its files")
      ->type_name("FOLDER")
      ->needs("--model");
  app.add_option("--lora-plus-ratio", flags.lora_plus_ratio, "LoRA+: the learning rate of the matrices B is so many times --lr")
      ->check(from_to(1e-6, 1e6));
  app.add_option("--neftune-alpha", flags.neftune_alpha, "NEFTune: the size of noise that is added to embeddings in training; often 5 to 15")
      ->check(from_to(0.0, 1e6));
  app.add_option("--adapter", flags.adapter, "Where to write the adapters after each epoch, as peft reads them")->type_name("FOLDER");
  app.add_option("--output", flags.output, "Where to write the trained model, with adapters in its weights, as a Hugging Face folder")
      ->type_name("FOLDER");
  app.add_option("--gguf", flags.gguf, "Where to write the model of --output as a GGUF file, too")->type_name("FILE")->needs("--output");
  app.add_option("--gguf-code", flags.gguf_code, "Format of matrices in the GGUF file")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_K"}));
  add_recipe_flags(app, flags, "Rows per rank and pass", "Seed of new weights and of the order of rows");
  app.add_flag("--keep-best", flags.keep_best,
               "Write the model with the best loss on --eval-data, not the last one, and keep its checkpoint and the newest --keep (default 1)")
      ->needs("--eval-data")
      ->needs("--ckpt-prefix");
  app.callback([&app, &flags] {
    if (flags.model.empty() == flags.config.empty())
      throw tessera::ConfigError("give either --model PATH, or --config FOLDER for a new model");
    for (const auto* name : {"--rank", "--alpha", "--dropout", "--target-modules"}) {
      if (flags.method == "full" && app.count(name) > 0)
        throw tessera::ConfigError(std::string(name) + " is for adapters, which --method full does not make; give another method");
      if (!flags.from_adapter.empty() && app.count(name) > 0)
        throw tessera::ConfigError(fmt::format("{} is taken from the adapter in {}; leave it out", name, flags.from_adapter.string()));
    }
    if (!flags.from_adapter.empty() && flags.method == "full")
      throw tessera::ConfigError("--from-adapter trains an adapter, which --method full does not do; leave one of them out");
    for (const auto* name : {"--packing", "--z-loss"}) {
      if (!flags.preference.empty() && app.count(name) > 0)
        throw tessera::ConfigError(std::string(name) + " is for texts; leave it out with --preference");
    }
    if (flags.keep_best) {
      if (!flags.run.keep) flags.run.keep.emplace();
      flags.run.keep->best = 1;
      flags.run.keep->metric = "eval_loss";
    }
    if (!flags.method.empty() && flags.method != "qlora" && flags.quantisation)
      throw tessera::ConfigError("--quantisation is for --method qlora; --method " + flags.method + " does not quantise weights");
  });
}
