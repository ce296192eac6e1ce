#include "tessera/shard/activation/untouched.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/shard/activation/digest.h"
#include "tessera/shard/activation/segment.h"
#include "tessera/shard/unit/units.h"

namespace tessera::activation {
namespace {

[[noreturn]] void refuse_touch(const std::string& what) {
  throw UsageError(fmt::format(
      "a checkpointed segment has changed {} again when it ran again in backward, by an assignment or through a pointer. Change it in place "
      "by an operator, as in buffer.copy_(x), which a segment does once; or outside of the segment; or only if activation::runs_again() says "
      "no",
      what));
}

}  // namespace

Untouched::Untouched(const torch::nn::Module* module, const Log& log) : module_(module) {
  if (module != nullptr) {
    for (const auto& item : module->named_buffers()) {
      if (item.value().defined()) buffers_.push_back({.name = item.key(), .tensor = item.value(), .values = digest_of(item.value())});
    }
  }
  for (const auto& write : log.writes) {
    if (auto storage = write.storage.lock()) {
      c10::Storage held(std::move(storage));
      const auto values = digest_of(held);
      memory_.push_back({.storage = std::move(held), .values = values});
    }
  }
}

void Untouched::expect() const {
  if (!buffers_.empty()) {
    const auto now = module_->named_buffers();
    for (const auto& [name, tensor, values] : buffers_) {
      const auto* const found = now.find(name);
      if (found != nullptr && found->defined() && digest_of(*found) == values) continue;
      refuse_touch(fmt::format("the buffer '{}' of {}", name, class_name(*module_)));
    }
  }
  for (const auto& [storage, values] : memory_) {
    if (digest_of(storage) != values) refuse_touch("a tensor that it also changes by operators");
  }
}

}  // namespace tessera::activation
