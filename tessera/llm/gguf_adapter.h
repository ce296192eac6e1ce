// Adapters of low rank in GGUF files, which llama.cpp applies to the GGUF file of a model.
#pragma once

#include <filesystem>

namespace tessera::llm {

/// Whether this is an adapter: a folder with adapter_config.json and no model, or a GGUF file.
bool is_adapter(const std::filesystem::path& path);

/// Writes a folder of Python's peft as the file that `llama-cli --lora` takes. `base` is the model that it was trained on, a folder with
/// config.json or a GGUF file, from which the shape is read. llama.cpp multiplies what a layer adds by alpha / rank, with one alpha: the
/// file has that of most layers, and the B of other layers is multiplied by the ratio. Throws ConfigError, and writes nothing, for an
/// adapter that has no place in such a file, such as DoRA, and UsageError if it is of another model.
void write_gguf_adapter(const std::filesystem::path& folder, const std::filesystem::path& file, const std::filesystem::path& base);

/// Writes such a file as a folder of peft. `base` may be left out if the file says how many heads the model has, as Tessera's do, or if the
/// architecture has no rows in pairs.
void write_peft_adapter(const std::filesystem::path& file, const std::filesystem::path& folder, const std::filesystem::path& base = {});

}  // namespace tessera::llm
