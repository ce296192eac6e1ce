#include "tessera/shard/wrap.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

using torch::nn::Module;

bool is_one_of(const std::string& name, const std::vector<std::string>& names) {
  return std::ranges::find(names, name) != names.end();
}

bool is_inside(const std::string& path, const std::string& of) {
  return of.empty() || path == of || path.starts_with(of + ".");
}

/// The path of the innermost module that contains both.
std::string common_path(const std::string& one, const std::string& other) {
  auto path = one;
  while (!is_inside(other, path)) path.erase(path.find_last_of('.') == std::string::npos ? 0 : path.find_last_of('.'));
  return path;
}

/// Makes the units of a policy, from the inside outwards.
class Wrapping {
 public:
  Wrapping(const ShardOptions& options, const WrapPolicy& policy) : options_(options), policy_(policy) {}

  /// Reads where parameters are registered. Comes before wrap_below(), because units change that.
  void look_at(const Module& module, const std::string& path) {
    if (!seen_.insert(&module).second) return;  // a module that is registered twice is one place
    classes_.insert(class_name(module));
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!is_free(item.value())) continue;
      const auto [place, is_new] = homes_.try_emplace(item.value().unsafeGetTensorImpl(), path);
      if (!is_new) place->second = common_path(place->second, path);
    }
    for (const auto& child : module.named_children()) look_at(*child.value(), path_below(path, child.key()));
  }

  void expect_classes() const {
    if (policy_.classes.empty()) return;
    if (std::ranges::any_of(policy_.classes, [&](const std::string& name) { return classes_.contains(name); })) return;
    throw UsageError(fmt::format("the model has no module of the class {}, which the policy names; it has {}",
                                 fmt::join(policy_.classes, " or "), fmt::join(classes_, ", ")));
  }

  /// Returns the parameters in the module that are left for modules further out.
  std::vector<at::Tensor> wrap_below(const Module& module, const std::string& path) {
    std::vector<at::Tensor> left;
    if (!wrapped_.insert(&module).second) return left;
    const bool is_leaf = is_one_of(class_name(module), policy_.leaves);
    const auto keep = [&](const at::Tensor& parameter) {
      const bool known = std::ranges::any_of(left, [&](const at::Tensor& other) { return other.is_same(parameter); });
      if (is_free(parameter) && !known) left.push_back(parameter);
    };
    for (const auto& parameter : module.parameters(/*recurse=*/is_leaf)) keep(parameter);
    for (const auto& child : module.named_children()) {
      if (is_leaf) break;
      const auto name = path_below(path, child.key());
      for (const auto& parameter : choose(*child.value(), name, wrap_below(*child.value(), name))) keep(parameter);
    }
    return left;
  }

 private:
  static bool is_free(const at::Tensor& parameter) { return parameter.defined() && locate(parameter).parameter == nullptr; }

  /// Makes a unit of a module if the policy chooses it. Returns what is left of `parameters`.
  std::vector<at::Tensor> choose(Module& module, const std::string& path, std::vector<at::Tensor> parameters) {
    WrapCandidate candidate{.module = module, .name = path, .class_name = class_name(module)};
    std::vector<at::Tensor> tied;  // to places outside of the module
    for (const auto& parameter : parameters) {
      if (is_inside(homes_.at(parameter.unsafeGetTensorImpl()), path)) {
        candidate.numel += parameter.numel();
      } else {
        tied.push_back(parameter);
      }
    }
    if (candidate.numel == 0 || !policy_.chooses(candidate)) return parameters;
    auto options = options_;
    // The boundary of the model is meant; inner modules are called by the model itself.
    options.mixed_precision.cast_forward_inputs = {};
    options.mixed_precision.output_dtype = {};
    options.left_out.insert(options.left_out.end(), tied.begin(), tied.end());
    fully_shard(module, options);
    return tied;
  }

  const ShardOptions& options_;
  const WrapPolicy& policy_;
  std::set<const Module*> seen_, wrapped_;
  std::set<std::string> classes_;
  std::map<c10::TensorImpl*, std::string> homes_;  // the path of the innermost module that contains all places of a parameter
};

}  // namespace

WrapPolicy wrap_always() {
  return {.chooses = [](const WrapCandidate&) { return true; }};
}

WrapPolicy wrap_classes(std::vector<std::string> classes) {
  return {.chooses = [classes](const WrapCandidate& candidate) { return is_one_of(candidate.class_name, classes); }, .classes = classes};
}

WrapPolicy wrap_by_size(WrapSizeOptions options) {
  const auto chooses = [options](const WrapCandidate& candidate) {
    return candidate.numel >= options.min_params && !is_one_of(candidate.class_name, options.exclude);
  };
  return {.chooses = chooses, .leaves = options.leaves};
}

void fully_shard(Module& model, const ShardOptions& options, const WrapPolicy& policy) {
  Wrapping wrapping(options, policy);
  wrapping.look_at(model, "");
  wrapping.expect_classes();
  wrapping.wrap_below(model, "");
  fully_shard(model, options);
}

}  // namespace tessera
