// Holds frozen weights in few bits, as the base of QLoRA.
#pragma once

#include "tessera/base/module_ref.h"
#include "tessera/nn/layer_choice.h"
#include "tessera/nn/quantize_forms.h"

namespace tessera::nn {

struct QuantizeOptions {
  Quantization quantization = Quantization::Nf4;
  LayerChoice layers = {};  // of the linear layers
};

/// Holds weights of linear layers in few bits. They are frozen, `parameters()` lists what is held (bytes), and operators get values that
/// are computed when they need them: one weight at a time. Called before fully_shard, on a model with values or within
/// deferred_init. Loading quantises what is read. Throws UsageError, and changes nothing, if a name matches no layer.
void quantize(ModuleRef model, const QuantizeOptions& options = {});

}  // namespace tessera::nn
