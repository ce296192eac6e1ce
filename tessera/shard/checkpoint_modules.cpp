#include "tessera/shard/checkpoint_modules.h"

#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera::activation {
namespace {

using torch::nn::Module;

/// Finds the modules that a policy chooses, inner ones first.
class ModuleChoice {
 public:
  explicit ModuleChoice(const WrapPolicy& policy) : policy_(policy) {}

  void look_below(Module& module, const std::string& path) {
    for (const auto& child : module.named_children()) {
      const auto& inner = child.value();
      const auto name = path_below(path, child.key());
      const auto kind = class_name(*inner);
      if (!seen_.insert(inner.get()).second) continue;
      classes.insert(kind);
      if (std::ranges::find(policy_.leaves, kind) == policy_.leaves.end()) look_below(*inner, name);
      ModuleInfo info{.module = *inner, .name = name, .class_name = kind};
      std::set<const void*> own;
      for (const auto& parameter : inner->parameters()) {
        const auto* const key = parameter.unsafeGetTensorImpl();
        if (taken_.contains(key) || !own.insert(key).second) continue;
        const auto found = locate(parameter);
        info.numel += found.parameter != nullptr ? c10::multiply_integers(found.parameter->sizes) : parameter.numel();
      }
      if (!policy_.chooses(info)) continue;
      taken_.merge(own);
      chosen.push_back(inner);
    }
  }

  std::vector<std::shared_ptr<Module>> chosen;
  std::set<std::string> classes;

 private:
  const WrapPolicy& policy_;
  std::set<const Module*> seen_;
  std::set<const void*> taken_;
};

}  // namespace

void checkpoint_module(const std::shared_ptr<Module>& module, const Options& options) {
  remember_segment(*module, options);
}

void checkpoint_modules(ModuleRef model, const WrapPolicy& policy, const Options& options) {
  if (policy.options || policy.merge_below > 0) {
    throw UsageError("the WrapPolicy has options or merge_below, which are for sharding; give checkpoint_modules a policy without them");
  }
  if (!policy.chooses) throw UsageError("the WrapPolicy has no function `chooses`; use wrap_classes({...}), or set `chooses`");
  ModuleChoice choice(policy);
  choice.look_below(model, "");
  expect_classes(policy.classes, choice.classes);
  for (const auto& module : choice.chosen) checkpoint_module(module, options);
}

at::Tensor checkpoint_sequential(const std::shared_ptr<torch::nn::SequentialImpl>& sequential, int64_t segments, at::Tensor x,
                                 const Options& options) {
  const auto size = static_cast<int64_t>(sequential->size());
  if (segments < 1 || segments > size) {
    throw UsageError("a Sequential of {} modules can't be divided into {} segments; give a number from 1 to {}", size, segments, size);
  }
  for (int64_t i = 0; i < segments; i++) {
    const auto run = [sequential, first = i * size / segments, end = (i + 1) * size / segments](at::Tensor value) {
      for (auto at = sequential->begin() + first; at != sequential->begin() + end; ++at) value = at->forward(std::move(value));
      return value;
    };
    x = i + 1 < segments ? checkpoint(options, detail::CallOf{sequential.get(), run}, std::move(x)) : run(std::move(x));
  }
  return x;
}

}  // namespace tessera::activation
