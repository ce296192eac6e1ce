// Gathers tensors that lie as the shards of a model do, such as optimizer state.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "tessera/shard/access/local_values.h"

namespace tessera {

/// Gathers a tensor for each parameter, those of a unit together and unit by unit. `own` gives this rank's values for a part, as many as
/// the part has, in a flat tensor, or an undefined one if there is nothing to gather for it, which must be so on all ranks. `visit` gets
/// the whole tensor, in memory that is freed afterwards. Collective.
void gather_like(const LocalValues& model, c10::function_ref<at::Tensor(const LocalPart& part)> own,
                 c10::function_ref<void(const LocalPart& part, const at::Tensor& whole)> visit);

}  // namespace tessera
