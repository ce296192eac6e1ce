#include "tessera/shard/deferred_init.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/deferred/recording.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/paging/paging.h"

namespace tessera {

detail::DeferredInit::DeferredInit(const DeferredInitOptions& options) {
  install_paging();
  if (Recording::tape() != nullptr) {
    throw UsageError("deferred_init was called inside deferred_init; the outer call defers all that its function makes");
  }
  tape_ = std::make_shared<Tape>(options.seed);
  recording_ = std::make_unique<Recording>(tape_);
}

detail::DeferredInit::~DeferredInit() = default;

void detail::DeferredInit::finish(const torch::nn::Module& module) {
  recording_.reset();
  const auto name = [&](const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& path) {
    auto* const storage = deferred_storage(tensor);
    if (storage == nullptr || storage->kind != DeferredStorage::Kind::Free) return;
    storage->kind = kind;
    storage->name = path;
    if (storage->tape == tape_) tape_->name(storage->number, path);
  };
  for (const auto& item : module.named_parameters()) name(item.value(), DeferredStorage::Kind::Parameter, item.key());
  for (const auto& item : module.named_buffers()) name(item.value(), DeferredStorage::Kind::Buffer, item.key());
}

void materialize(ModuleRef module, const InitFunction& init) {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::string> unknown;
  for (const auto& item : module->named_parameters()) {
    if (!materialize(item.value(), DeferredStorage::Kind::Parameter, item.key(), init, c10::kCPU)) unknown.push_back(item.key());
  }
  for (const auto& item : module->named_buffers()) {
    if (!materialize(item.value(), DeferredStorage::Kind::Buffer, item.key(), init, c10::kCPU)) unknown.push_back(item.key());
  }
  if (unknown.empty()) return;
  throw UsageError(
      "nobody knows the values of {}: make the module inside deferred_init, give materialize a function that "
      "initialises them, or load weights into it",
      some_of(unknown));
}

}  // namespace tessera
