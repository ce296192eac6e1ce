// The keys of config.json about the rotary embeddings of decoders like Llama.
#pragma once

#include <string>
#include <string_view>

#include "tessera/models/config_file.h"
#include "tessera/models/llama_config.h"

namespace tessera::models {

constexpr std::string_view kFull = "full_attention", kSliding = "sliding_attention";  // the kinds of layers

/// Reads the keys of rope_parameters, or of rope_scaling, which older files have next to rope_theta.
void read_rope(const ConfigFile& file, const std::string& key, LlamaConfig& config);
void write_rope(const nn::RotaryOptions& rope, Json& json);

}  // namespace tessera::models
