// Helpers that saving and loading share.
#pragma once

#include <ATen/core/grad_mode.h>

#include <string_view>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/calling.h"
#include "tessera/shard/forward_phase.h"

namespace tessera::checkpoint {

/// Functions that read or write the values of models create this first. Throws UsageError in the middle of a forward or backward pass.
struct OuterCall {
  explicit OuterCall(std::string_view function) : calling(function), no_grad(false) { expect_idle(function); }

  const Calling calling;
  const c10::AutoGradMode no_grad;
};

inline void expect_model(const Contents& contents) {
  if (contents.model == nullptr) throw UsageError("a checkpoint needs a model: give Contents::model");
  if (contents.average != nullptr && !contents.optimizer)
    throw UsageError("a checkpoint holds an average only with the state of its optimizer: give Contents::optimizer");
}

}  // namespace tessera::checkpoint
