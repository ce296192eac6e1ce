#include "tessera/shard/access/batch_norm.h"

#include <utility>

#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {

bool replace_batch_norm(const at::Tensor& weight, BatchNorm replacement) {
  auto* const meta = unsharded_meta(weight);
  if (meta != nullptr) meta->batch_norm = std::make_shared<const BatchNorm>(std::move(replacement));
  return meta != nullptr;
}

}  // namespace tessera
