#include "tessera/train/adapter_settings.h"

#include <span>

#include "tessera/base/error.h"
#include "tessera/train/sharding_settings.h"

namespace tessera::train {
namespace {

void (*registered)(const config::Settings& settings, ModuleRef model) = nullptr;

}  // namespace

AddedAdapt::AddedAdapt(void (*adapt)(const config::Settings& settings, ModuleRef model)) {
  registered = adapt;
}

void adapt(const config::Settings& settings, ModuleRef model) {
  const bool adds = settings.integer("tessera_lora_r") > 0;
  if (!adds && !settings.is_set("tessera_lora_r") && !given_of(settings, std::span(kKeysOfAdapters).subspan(2)).empty())
    throw ConfigError("there are no adapters; give tessera_lora_r");
  if (!adds && settings.text("tessera_quantisation") == "no") return;
  if (registered == nullptr) {
    throw ConfigError("{} is a setting of Tessera's package models, with which this program is not linked; link tessera::models",
                      adds ? "tessera_lora_r" : "tessera_quantisation");
  }
  registered(settings, model);
}

}  // namespace tessera::train
