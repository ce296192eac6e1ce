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
    throw UsageError("deferred_init was called inside deferred_init; remove the inner call, because the outer one defers everything that its function makes");
  }
  tape_ = std::make_shared<Tape>(options.seed);
  recording_ = std::make_unique<Recording>(tape_);
}

detail::DeferredInit::~DeferredInit() = default;

void detail::DeferredInit::finish(const torch::nn::Module& module) {
  recording_.reset();
  for_each_named(module, [&](const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& path) {
    auto* const storage = deferred_storage(tensor);
    if (storage == nullptr || storage->kind != DeferredStorage::Kind::Free) return;
    storage->kind = kind;
    storage->name = path;
    if (storage->tape == tape_) tape_->name(storage->number, path);
  });
}

void materialize(ModuleRef module, const InitFunction& init) {
  const c10::AutoGradMode no_grad(false);
  std::vector<std::string> unknown;
  for_each_named(module, [&](const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name) {
    if (!materialize(tensor, kind, name, init, c10::kCPU)) unknown.push_back(name);
  });
  if (unknown.empty()) return;
  throw UsageError(
      "nobody knows the values of {}: make the module inside deferred_init, give materialize a function that "
      "initialises them, or load weights into it",
      some_of(unknown));
}

}  // namespace tessera
