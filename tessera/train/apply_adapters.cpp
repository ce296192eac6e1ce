// Gives models the adapters and quantised weights that settings ask for: the part of adapter_settings.h that needs the package models.
#include "tessera/base/error.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/quantize.h"
#include "tessera/train/adapter_settings.h"
#include "tessera/train/sharding_settings.h"

namespace tessera::train {
namespace {

void apply_adapters(const config::Settings& settings, ModuleRef model) {
  const auto rank = settings.integer("tessera_lora_r");
  if (rank > 0 && !lora::adapters(model).empty())
    throw ConfigError("the program has given the model adapters itself; leave tessera_lora_r out, or set it to 0");
  if (const auto& quantisation = settings.text("tessera_quantisation"); quantisation != "no")
    nn::quantize(model, {.quantization = nn::quantization_named(quantisation)});
  if (rank == 0) return;
  lora::apply(model, {.r = rank,
                      .lora_alpha = settings.number("tessera_lora_alpha"),
                      .use_rslora = settings.is_true("tessera_lora_rslora"),
                      .lora_dropout = settings.number("tessera_lora_dropout"),
                      .use_dora = settings.is_true("tessera_lora_dora"),
                      .layers = {.target_modules = comma_separated(settings.text("tessera_lora_target_modules"))},
                      .modules_to_save = comma_separated(settings.text("tessera_lora_modules_to_save")),
                      .bias = lora::bias_named(settings.text("tessera_lora_bias")).value()});
}

const AddedAdapt added(apply_adapters);

}  // namespace
}  // namespace tessera::train
