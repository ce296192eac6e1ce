#include "tessera/shard/forward_phase.h"

#include <torch/csrc/autograd/graph_task.h>

#include "tessera/base/error.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

thread_local const ForwardPhase* innermost = nullptr;

}  // namespace

ForwardPhase::ForwardPhase(const torch::nn::Module& module, const Unit* unit) : module_(module), unit_(unit), outer_(innermost) {
  innermost = this;
}

ForwardPhase::~ForwardPhase() {
  innermost = outer_;
}

std::optional<std::string> forward_phase() {
  if (innermost == nullptr) return std::nullopt;
  const auto* phase = innermost;
  while (phase->outer_ != nullptr) phase = phase->outer_;
  return phase->unit_ != nullptr ? phase->unit_->name() : class_name(phase->module_);
}

bool in_forward_of(const torch::nn::Module& module) {
  const auto* phase = innermost;
  while (phase != nullptr && &phase->module_ != &module) phase = phase->outer_;
  return phase != nullptr;
}

void expect_idle(std::string_view what) {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    throw UsageError("{} was called during backward, in a hook or in a backward function; call it after backward() has returned", what);
  }
  if (const auto module = forward_phase()) {
    throw UsageError("{} was called during the forward of '{}'; call it after the forward has returned", what, *module);
  }
}

}  // namespace tessera
