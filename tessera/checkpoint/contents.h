// Helpers for Contents that saving and loading share.
#pragma once

#include <c10/util/Type.h>

#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/optim/optimizer.h"

namespace tessera::checkpoint {

inline void expect_model(const Contents& contents) {
  if (contents.model == nullptr) throw UsageError("a checkpoint needs a model: give Contents::model");
}

/// The class name of the optimizer. Empty if there is none.
inline std::string optimizer_class(const Contents& contents) {
  return contents.optimizer != nullptr ? c10::demangle(typeid(*contents.optimizer).name()) : "";
}

}  // namespace tessera::checkpoint
