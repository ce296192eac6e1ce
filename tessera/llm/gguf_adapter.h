// Converts LoRA adapters between PEFT folders and GGUF files, which llama.cpp applies to the GGUF file of a model.
#pragma once

#include <filesystem>

namespace tessera::llm {

/// Whether the path is an adapter: a folder with adapter_config.json and no model, or the GGUF file of an adapter.
bool is_adapter(const std::filesystem::path& path);

/// Writes a folder of Python's PEFT as the file that `llama-cli --lora` takes. `base` is the model that the adapter was trained on, a
/// folder with config.json or a GGUF file, from which the shape is read. llama.cpp multiplies the update of each layer by alpha / rank,
/// with one alpha for all layers: the file has the alpha of most layers, and the matrix B of other layers is multiplied by the ratio of the
/// alphas. Throws ConfigError, and writes nothing, for an adapter that such a file can't hold, such as DoRA, and UsageError if the adapter
/// is of another model.
void write_gguf_adapter(const std::filesystem::path& folder, const std::filesystem::path& file, const std::filesystem::path& base);

/// Writes the GGUF file of an adapter as a folder of PEFT. `base` may be left out if the file says how many heads the model has, as
/// Tessera's files do, or if llama.cpp does not reorder the rows of this architecture.
void write_peft_adapter(const std::filesystem::path& file, const std::filesystem::path& folder, const std::filesystem::path& base = {});

}  // namespace tessera::llm
