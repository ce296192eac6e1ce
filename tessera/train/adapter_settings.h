// Adapters and quantised weights that a configuration asks for. The package models applies them to a model, and registers itself here.
#pragma once

#include <string_view>

#include "tessera/base/module_ref.h"
#include "tessera/config/settings.h"

namespace tessera::train {

/// Gives a model that is not sharded yet the adapters and quantised weights of the settings. Throws ConfigError if settings contradict each
/// other or the package is not there, and UsageError for names that the model lacks.
void adapt(const config::Settings& settings, ModuleRef model);

/// Registers the function that does it, while the package is loaded.
struct AddedAdapt {
  explicit AddedAdapt(void (*adapt)(const config::Settings& settings, ModuleRef model));
};

inline constexpr std::string_view kKeysOfAdapters[] = {
    "tessera_quantisation", "tessera_lora_r",    "tessera_lora_alpha",          "tessera_lora_dropout",
    "tessera_lora_rslora",  "tessera_lora_dora", "tessera_lora_target_modules", "tessera_lora_modules_to_save",
    "tessera_lora_bias"};

}  // namespace tessera::train
