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

  std::filesystem::path model, config, data, eval_data, output, gguf, adapter;
  std::string optimizer = "adamw";
  // Adapters: the configuration's keys apply where a flag is not given.
  std::string method;
  std::optional<std::string> quantisation, target_modules;
  std::optional<int64_t> rank;
  std::optional<double> alpha, dropout;
  int64_t length = 0, rows_at_once = 0;
  double lr = 2e-5, weight_decay = 0.1, clip = 1, warmup = 0.03, z_loss = 0;
  tessera::llm::Packing packing = tessera::llm::Packing::Cut;
  std::string units = "root", gguf_code = "F16", prompt;
  int64_t new_tokens = 64;
  double temperature = 0, top_p = 1;
};

inline void declare(CLI::App& app, Flags& flags) {
  using tessera::cli::from_to;
  app.add_option("--model", flags.model, "The model to train on: a Hugging Face folder, or a GGUF file")->type_name("PATH");
  app.add_option("--config", flags.config, "In place of --model: a folder with config.json and tokenizer.json, and new weights")
      ->type_name("FOLDER");
  app.add_option("--data", flags.data, "Tokens to train on, made by `tessera data tokenize`")->type_name("FILE")->required();
  app.add_option("--eval-data", flags.eval_data, "Tokens of which the loss is measured after each epoch")->type_name("FILE");
  app.add_option("--length", flags.length, "Tokens in a row; 512, or as many as the model takes, unless given")
      ->check(from_to(2, 10'000'000));
  app.add_option_function<std::string>(
         "--packing",
         [&](const std::string& name) { flags.packing = name == "whole" ? tessera::llm::Packing::Whole : tessera::llm::Packing::Cut; },
         "cut: documents follow each other, and are cut at the end of a row; whole: rows of whole documents, with padding")
      ->check(tessera::cli::one_of({"cut", "whole"}))
      ->default_str("cut");
  app.add_option("--lr", flags.lr, "Highest learning rate")->capture_default_str()->check(from_to(0.0, 1000.0));
  app.add_option("--optimizer", flags.optimizer,
                 "adamw8bit has moments of large parameters in eight bits: two bytes for a value, not eight")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"adamw", "adamw8bit"}));
  app.add_option("--warmup", flags.warmup, "The share of steps in which it rises; then it falls, as a cosine")
      ->capture_default_str()
      ->check(from_to(0.0, 1.0));
  app.add_option("--weight-decay", flags.weight_decay, "Of all parameters but norms and biases")->capture_default_str()->check(from_to(0.0, 1000.0));
  app.add_option("--clip", flags.clip, "The greatest norm of gradients; 0 is any")->capture_default_str()->check(from_to(0.0, 1e9));
  app.add_option("--z-loss", flags.z_loss, "Keeps scores from drifting away")->capture_default_str()->check(from_to(0.0, 1.0));
  app.add_option("--loss-rows", flags.rows_at_once,
                 "Tokens of which scores are in memory at once; 0: of 32 MB, or an eighth of the head's gradient")
      ->capture_default_str()
      ->check(from_to(0, 1'000'000'000));
  app.add_option("--units", flags.units, "Units besides the layers: root, apart or head-with-norm")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"root", "apart", "head-with-norm"}));
  app.add_option("--method", flags.method,
                 "What trains: full: all weights; lora, dora: adapters beside frozen weights; qlora: the same, of weights in few bits; "
                 "what the configuration says unless given")
      ->check(tessera::cli::one_of({"full", "lora", "dora", "qlora"}));
  app.add_option("--rank", flags.rank, "Of adapters")->default_str("8")->check(from_to(1, 100'000));
  app.add_option("--alpha", flags.alpha, "What adapters add is multiplied by this and divided by the rank")
      ->default_str("16")
      ->check(from_to(0.0, 1e6));
  app.add_option("--dropout", flags.dropout, "Of what goes into adapters")->default_str("0")->check(from_to(0.0, 0.999));
  app.add_option("--target-modules", flags.target_modules,
                 "The layers that get adapters, by the ends of their names: q_proj,v_proj; all linear layers but the head unless given")
      ->type_name("NAMES");
  app.add_option("--quantisation", flags.quantisation, "In what qlora holds weights")
      ->default_str("nf4")
      ->check(tessera::cli::one_of({"nf4", "nf4_single", "int8", "fp8"}));
  app.add_option("--adapter", flags.adapter, "Where to write the adapters after each epoch, as peft reads them")->type_name("FOLDER");
  app.add_option("--output", flags.output, "Where to write the trained model, with adapters in its weights, as a Hugging Face folder")
      ->type_name("FOLDER");
  app.add_option("--gguf", flags.gguf, "Where to write it as a GGUF file, too")->type_name("FILE")->needs("--output");
  app.add_option("--gguf-code", flags.gguf_code, "In what the GGUF file has matrices")
      ->capture_default_str()
      ->check(tessera::cli::one_of({"F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_K"}));
  app.add_option("--prompt", flags.prompt, "A text that the model goes on with, before training and after");
  app.add_option("--max-new-tokens", flags.new_tokens, "How far it goes on")->capture_default_str()->check(from_to(1, 1'000'000));
  app.add_option("--temperature", flags.temperature, "0: always the likeliest token")->capture_default_str()->check(from_to(0.0, 100.0));
  app.add_option("--top-p", flags.top_p, "Draws from the likeliest tokens that together have this probability")
      ->capture_default_str()
      ->check(from_to(1e-6, 1.0));
  add_recipe_flags(app, flags, "Rows per rank and pass", "Of new weights, of the order of rows and of drawn texts");
  app.callback([&app, &flags] {
    if (flags.model.empty() == flags.config.empty())
      throw tessera::ConfigError("give either --model PATH, or --config FOLDER for a new model");
    for (const auto* name : {"--rank", "--alpha", "--dropout", "--target-modules"}) {
      if (flags.method == "full" && app.count(name) > 0)
        throw tessera::ConfigError(std::string(name) + " is of adapters, which --method full does not make; give another method");
    }
    if (!flags.method.empty() && flags.method != "qlora" && flags.quantisation)
      throw tessera::ConfigError("--quantisation is of --method qlora; --method " + flags.method + " leaves weights as they are");
  });
}
