// Writes the results of the recipe for language models: the model and its adapters.
#pragma once

#include <fmt/format.h>
#include <tessera/base/atomic_write.h>
#include <tessera/base/folder.h>
#include <tessera/checkpoint/formats/hub.h>

#include "llama_model.h"

namespace {

/// Checks before training that the files of the output can be written.
void expect_places(const Flags& flags) {
  const auto expect_other = [](const char* flag, const std::filesystem::path& folder, const std::filesystem::path& used, const char* what) {
    if (!used.empty() && std::filesystem::weakly_canonical(used) == std::filesystem::weakly_canonical(folder))
      throw ConfigError(fmt::format("{} {} is {}; give another folder", flag, folder.string(), what));
  };
  if (!flags.adapter.empty()) {
    expect_other("--adapter", flags.adapter, flags.model, "the model that is trained on");
    expect_other("--adapter", flags.adapter, flags.output, "where the merged model goes");
    expect_other("--adapter", flags.adapter, flags.run.prefix, "the prefix of the checkpoints");
    expect_other("--adapter", flags.adapter, flags.from_adapter, "the adapter from which training begins");
    checkpoint::expect_no_model(flags.adapter);
  }
  if (!flags.output.empty()) {
    expect_other("--output", flags.output, flags.model, "the model that is trained on");
    checkpoint::expect_free_for_model(flags.output);
  }
  if (!flags.adapter.empty()) {
    make_folder(flags.adapter);
    const NewFile trial(flags.adapter / checkpoint::kAdapterConfig);
  }
  if (flags.output.empty()) return;
  make_folder(flags.output);
  const NewFile trial(flags.output / "config.json");
  if (flags.gguf.empty()) return;
  if (flags.gguf.has_parent_path()) make_folder(flags.gguf.parent_path());
  if (flags.gguf.extension() != ".gguf")
    throw ConfigError(fmt::format("--gguf {}: the name of a GGUF file must end in .gguf", flags.gguf.string()));
  const NewFile other(flags.gguf);
}

void save_adapter(const Model& model, const Flags& flags, const Trainer& trainer) {
  checkpoint::save_adapter(model, flags.adapter, trainer.world(), {.base = flags.model, .task_type = "CAUSAL_LM"});
}

void write(Model& model, const Flags& flags, const Source& source, Trainer& trainer, train::Run& run) {
  if (!has_adapters(model)) trainer.save_model(model, flags.output);
  if (trainer.is_main_process()) {
    if (has_adapters(model)) checkpoint::merge_adapter(flags.model, flags.adapter, flags.output);
    source.config.write(flags.output, llm::dtype_of_weights(flags.output));
    source.tokenizer.write(flags.output);
    if (!flags.gguf.empty()) llm::write_gguf(flags.output, flags.gguf, {.code = flags.gguf_code});
  }
  run.say(fmt::format("wrote the model to {}{}", flags.output.string(), flags.gguf.empty() ? "" : " and " + flags.gguf.string()));
}

}  // namespace
