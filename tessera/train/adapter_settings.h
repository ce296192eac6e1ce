// Adapters and quantised weights that a configuration asks for. The package models applies them to a model, and registers itself here.
#pragma once

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

}  // namespace tessera::train
