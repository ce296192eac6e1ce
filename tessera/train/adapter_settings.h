// Gives a model the adapters and quantised weights of a configuration. The package models has the function that does this, and registers it
// here.
#pragma once

#include "tessera/base/module_ref.h"
#include "tessera/config/settings.h"

namespace tessera::train {

/// Gives a model the adapters and quantised weights that the settings ask for, before the model is sharded. Throws ConfigError if settings
/// contradict each other or the package is missing, and UsageError for names that the model lacks.
void adapt(const config::Settings& settings, ModuleRef model);

/// Registers the function that adapt() calls, while the package is loaded.
struct AddedAdapt {
  explicit AddedAdapt(void (*adapt)(const config::Settings& settings, ModuleRef model));
};

}  // namespace tessera::train
