#include "tessera/train/adapter_settings.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

void (*registered)(const config::Settings& settings, ModuleRef model) = nullptr;

}  // namespace

AddedAdapt::AddedAdapt(void (*adapt)(const config::Settings& settings, ModuleRef model)) {
  registered = adapt;
}

void adapt(const config::Settings& settings, ModuleRef model) {
  const bool adds = settings.integer("tessera_lora_r") > 0;
  const auto is_given = [&](const config::Key& key) { return key.name.starts_with("tessera_lora_") && !settings.is_usual(key.name); };
  if (!adds && !settings.is_set("tessera_lora_r") && std::ranges::any_of(config::keys(), is_given))
    throw ConfigError("settings of adapters have no effect without tessera_lora_r; give it the rank of the adapters");
  if (!adds && settings.text("tessera_quantisation") == "no") return;
  if (registered == nullptr) {
    throw ConfigError("{} needs Tessera's package models, but this program is not linked with it; link tessera::models",
                      adds ? "tessera_lora_r" : "tessera_quantisation");
  }
  registered(settings, model);
}

}  // namespace tessera::train
