// Helpers for Contents that saving and loading share.
#pragma once

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

inline void expect_model(const Contents& contents) {
  if (contents.model == nullptr) throw UsageError("a checkpoint needs a model: give Contents::model");
  if (contents.average != nullptr && !contents.optimizer)
    throw UsageError("a checkpoint holds an average beside the state of the optimizer: give Contents::optimizer");
}

}  // namespace tessera::checkpoint
