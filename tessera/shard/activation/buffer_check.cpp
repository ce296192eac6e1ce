#include "tessera/shard/activation/buffer_check.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/shard/activation/digest.h"
#include "tessera/shard/unit/units.h"

namespace tessera::activation {

BufferCheck::BufferCheck(const torch::nn::Module* module) : module_(module) {
  if (module == nullptr) return;
  for (const auto& item : module->named_buffers()) {
    if (item.value().defined()) buffers_.push_back({.name = item.key(), .tensor = item.value(), .values = digest_of(item.value())});
  }
}

void BufferCheck::expect_unchanged() const {
  if (buffers_.empty()) return;
  const auto now = module_->named_buffers();
  for (const auto& [name, tensor, values] : buffers_) {
    const auto* const found = now.find(name);
    if (found != nullptr && found->defined() && digest_of(*found) == values) continue;
    throw UsageError(fmt::format(
        "a checkpointed segment has changed the buffer '{}' of {} again when it ran again in backward, by an assignment or through a "
        "pointer. Change it in place by an operator, as in buffer.copy_(x), which a segment does once; or outside of the segment; or only "
        "if activation::is_recompute() says no",
        name, class_name(*module_)));
  }
}

}  // namespace tessera::activation
