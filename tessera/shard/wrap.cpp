#include "tessera/shard/wrap.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/shard/unit/ignored_parameters.h"
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

/// The path of the innermost module that contains both paths.
std::string common_path(const std::string& one, const std::string& other) {
  auto path = one;
  while (!is_inside(other, path)) path.erase(path.find_last_of('.') == std::string::npos ? 0 : path.find_last_of('.'));
  return path;
}

/// Makes the units of a policy, from the inside outwards.
class Wrapping {
 public:
  Wrapping(const ShardOptions& options, const WrapPolicy& policy) : options_(options), policy_(policy) {}

  /// Reads where parameters are registered. Called before wrap_below(), because units replace the registered tensors.
  void look_at(const Module& module, const std::string& path) {
    if (!seen_.insert(&module).second) return;  // a module that is registered twice counts once
    classes_.insert(class_name(module));
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!is_free(item.value())) continue;
      const auto [place, is_new] = homes_.try_emplace(item.value().unsafeGetTensorImpl(), path);
      if (!is_new) place->second = common_path(place->second, path);
    }
    for (const auto& child : module.named_children()) look_at(*child.value(), path_below(path, child.key()));
  }

  const std::set<std::string>& classes() const { return classes_; }

  /// Makes the units inside of the module. Returns the module's parameters that are in no unit, which are left for the modules around it.
  std::vector<at::Tensor> wrap_below(const Module& module, const std::string& path) {
    std::vector<at::Tensor> left;
    if (!wrapped_.insert(&module).second) return left;
    const bool is_leaf = is_one_of(class_name(module), policy_.leaves);
    const auto keep = [&](const at::Tensor& parameter) {
      if (is_free(parameter) && !is_in(left, parameter)) left.push_back(parameter);
    };
    for (const auto& parameter : module.parameters(/*recurse=*/is_leaf)) keep(parameter);
    Row row;
    for (const auto& child : module.named_children()) {
      if (is_leaf) break;
      const auto name = path_below(path, child.key());
      for (const auto& parameter : choose(child.value(), name, wrap_below(*child.value(), name), row)) keep(parameter);
    }
    make_unit(row);
    return left;
  }

 private:
  /// Neighbouring modules that become one unit.
  struct Row {
    std::vector<std::shared_ptr<Module>> modules = {};
    std::vector<at::Tensor> tied = {};  // parameters of the modules that are also registered outside of their module
    int64_t numel = 0;
  };

  /// Whether a unit of the policy may take the parameter.
  bool is_free(const at::Tensor& parameter) const {
    return parameter.defined() && locate(parameter).parameter == nullptr && !is_in(options_.ignored, parameter) &&
           !is_in(options_.left_out, parameter);
  }

  /// Puts a module into the row, or makes a unit of it, if the policy chooses it. Returns the `parameters` that are left for outer modules.
  std::vector<at::Tensor> choose(const std::shared_ptr<Module>& module, const std::string& path, std::vector<at::Tensor> parameters,
                                 Row& row) {
    ModuleInfo info{.module = *module, .name = path, .class_name = class_name(*module)};
    std::vector<at::Tensor> tied;  // parameters that are also registered outside of the module
    for (const auto& parameter : parameters) {
      if (is_inside(homes_.at(parameter.unsafeGetTensorImpl()), path)) {
        info.numel += parameter.numel();
      } else {
        tied.push_back(parameter);
      }
    }
    if (info.numel == 0 || !policy_.chooses(info)) {
      if (!module->parameters().empty()) make_unit(row);
      return parameters;
    }
    auto own_options = policy_.options ? policy_.options(info) : std::nullopt;
    if (own_options && !own_options->mesh) own_options->mesh = options_.mesh;
    const bool joins = !own_options && info.numel < policy_.merge_below;
    if (!joins || row.numel + info.numel > policy_.merge_below) make_unit(row);
    row.modules.push_back(module);
    row.tied.insert(row.tied.end(), tied.begin(), tied.end());
    row.numel += info.numel;
    if (own_options) expect_lists_of_model(*own_options, path);
    if (!joins) make_unit(row, own_options ? *own_options : inner_options());
    return tied;
  }

  /// The options of a unit below the model, without casts of inputs and outputs, which are meant for the boundary of the model.
  ShardOptions inner_options() const {
    auto options = options_;
    options.mixed_precision.cast_forward_inputs = {};
    options.mixed_precision.output_dtype = {};
    return options;
  }

  /// Makes a unit of the modules in the row, if there are any, and empties it.
  void make_unit(Row& row) { make_unit(row, inner_options()); }
  void make_unit(Row& row, ShardOptions options) {
    const auto [modules, tied, numel] = std::exchange(row, {});
    if (modules.empty()) return;
    std::vector<Module*> pointers;
    for (const auto& module : modules) pointers.push_back(module.get());
    options.ignored = options_.ignored;
    options.replicated = options_.replicated;
    options.left_out = options_.left_out;
    options = options_for(pointers, std::move(options));
    for (const auto& parameter : tied) {
      std::erase_if(options.replicated, [&](const at::Tensor& other) { return other.is_same(parameter); });
      if (!is_in(options.left_out, parameter)) options.left_out.push_back(parameter);
    }
    fully_shard(modules, options);
  }

  /// Throws UsageError if options of a module name parameters that the model's options do not name.
  void expect_lists_of_model(const ShardOptions& own, const std::string& path) const {
    const std::pair<const std::vector<at::Tensor>*, const std::vector<at::Tensor>*> lists[] = {
        {&own.ignored, &options_.ignored}, {&own.replicated, &options_.replicated}, {&own.left_out, &options_.left_out}};
    for (const auto& [given, of_model] : lists) {
      if (std::ranges::all_of(*given, [&, all = of_model](const at::Tensor& parameter) { return is_in(*all, parameter); })) continue;
      throw UsageError(
          "the policy's options for '{}' name parameters that are ignored, replicated or left out; name them in the options of the model",
          path);
    }
  }

  const ShardOptions& options_;
  const WrapPolicy& policy_;
  std::set<const Module*> seen_, wrapped_;
  std::set<std::string> classes_;
  std::map<c10::TensorImpl*, std::string> homes_;  // the path of the innermost module that contains all places of a parameter
};

}  // namespace

WrapPolicy wrap_always() {
  return {.chooses = [](const ModuleInfo&) { return true; }};
}

WrapPolicy wrap_classes(std::vector<std::string> classes) {
  return {.chooses = [classes](const ModuleInfo& info) { return is_one_of(info.class_name, classes); }, .classes = classes};
}

WrapPolicy wrap_by_size(WrapSizeOptions options) {
  const auto chooses = [options](const ModuleInfo& info) {
    return info.numel >= options.min_params && !is_one_of(info.class_name, options.exclude);
  };
  return {.chooses = chooses, .leaves = options.leaves};
}

namespace {

/// The tensors that `list` returns for all modules whose path matches, each once.
std::vector<at::Tensor> tensors_of_modules(const Module& model, const std::string& pattern,
                                           c10::function_ref<std::vector<at::Tensor>(const Module&)> list) {
  std::regex expression;
  try {
    expression = pattern;
  } catch (const std::regex_error& error) {
    throw UsageError("'{}' is not a regular expression: {}", pattern, error.what());
  }
  std::vector<at::Tensor> result;
  std::vector<std::string> paths;
  bool found = false;
  for (const auto& item : model.named_modules(/*name_prefix=*/{}, /*include_self=*/false)) {
    paths.push_back(item.key());
    if (!std::regex_match(item.key(), expression)) continue;
    found = true;
    for (const auto& tensor : list(*item.value())) {
      if (tensor.defined() && !is_in(result, tensor)) result.push_back(tensor);
    }
  }
  if (found) return result;
  const auto nearest = nearest_name(pattern, paths);
  throw UsageError("no module matches '{}'{}; the model has {}", pattern,
                   nearest.empty() ? "" : fmt::format(" (did you mean '{}'?)", nearest), some_of(paths));
}

}  // namespace

std::vector<at::Tensor> parameters_of_modules(ConstModuleRef model, const std::string& pattern) {
  return tensors_of_modules(model, pattern, [](const Module& module) { return module.parameters(); });
}

std::vector<at::Tensor> buffers_of_modules(ConstModuleRef model, const std::string& pattern) {
  return tensors_of_modules(model, pattern, [](const Module& module) { return module.buffers(); });
}

void fully_shard(ModuleRef model, const ShardOptions& options, const WrapPolicy& policy) {
  Module* const whole[] = {&*model};
  expect_named_once(whole, options);
  if (!policy.chooses) {
    throw UsageError("the WrapPolicy has no function `chooses`; take one of wrap_always, wrap_classes and wrap_by_size, or set it");
  }
  Wrapping wrapping(options, policy);
  wrapping.look_at(model, "");
  expect_classes(policy.classes, wrapping.classes());
  wrapping.wrap_below(model, "");
  fully_shard(model, options_for(whole, options));
}

}  // namespace tessera
