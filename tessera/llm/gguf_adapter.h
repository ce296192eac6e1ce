// Adapters of low rank in GGUF files, which llama.cpp applies to the GGUF file of a model.
#pragma once

#include <filesystem>

namespace tessera::llm {

/// Whether this is an adapter: a folder with adapter_config.json and no model, or a GGUF file.
bool is_adapter(const std::filesystem::path& path);

/// Writes a folder of Python's peft as the file that `llama-cli --lora` takes. `base` is the model that it was trained on, a folder with
/// config.json or a GGUF file, of which the shape is read. llama.cpp multiplies what a layer adds by alpha / rank, with one alpha: the file
/// has that of most layers, and in other layers, B is multiplied by what differs. Throws ConfigError, and writes nothing, for what has no
/// place in such a file, such as DoRA, and UsageError if the adapter is of another model.
void write_gguf_adapter(const std::filesystem::path& folder, const std::filesystem::path& file, const std::filesystem::path& base);

/// The way back: a folder of peft. `base` may be left out where the file says how many heads the model has, as ours do, or where the
/// architecture has no rows in pairs.
void write_peft_adapter(const std::filesystem::path& file, const std::filesystem::path& folder, const std::filesystem::path& base = {});

}  // namespace tessera::llm
