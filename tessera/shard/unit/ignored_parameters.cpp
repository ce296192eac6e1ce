#include "tessera/shard/unit/ignored_parameters.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/sweep.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

using torch::nn::Module;

/// The parameters that are ignored, keyed by address. Owns neither the parameters nor their models.
struct IgnoredParameters {
  std::mutex mutex;
  std::map<const c10::TensorImpl*, std::pair<WeakTensor, Ignored>> known;
  Sweep sweep;
};

IgnoredParameters& ignored_parameters() {
  static IgnoredParameters instance;
  return instance;
}

using Names = std::map<c10::TensorImpl*, std::string>;

/// Returns the parameters of the modules that are in no unit.
Names free_parameters(std::span<Module* const> modules) {
  Names result;
  for (const auto* module : modules) {
    for (const auto& item : module->named_parameters()) {
      if (locate(item.value()).parameter == nullptr) result.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
    }
  }
  return result;
}

/// Adds the buffers of the modules, because buffers may be ignored as well: they keep their dtype.
Names with_buffers(Names parameters, std::span<Module* const> modules) {
  for (const auto* module : modules) {
    for (const auto& item : module->named_buffers()) {
      if (item.value().defined()) parameters.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
    }
  }
  return parameters;
}

std::string unknown(const std::string& list, const at::Tensor& tensor, std::span<Module* const> modules) {
  if (!tensor.defined()) return fmt::format("ShardOptions::{} has a tensor that is undefined; did the module not make it yet?", list);
  if (const auto place = locate(tensor); place.parameter != nullptr) {
    return fmt::format("ShardOptions::{} names '{}', which is in unit '{}' already; name it in the call that makes this unit", list,
                       place.parameter->name, place.unit->name());
  }
  std::vector<std::string> classes;
  for (const auto* module : modules) classes.push_back(class_name(*module));
  return fmt::format(
      "ShardOptions::{} has a tensor of {} [{}] that is no parameter of {}; name a parameter in the fully_shard call for a module in which "
      "it is registered",
      list, c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "), fmt::join(classes, "+"));
}

}  // namespace

bool is_in(std::span<const at::Tensor> tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(tensors, [&](const at::Tensor& other) { return other.is_same(tensor); });
}

void expect_named_once(std::span<Module* const> modules, const ShardOptions& options) {
  if (options.ignored.empty() && options.replicated.empty() && options.left_out.empty()) return;
  const auto parameters = free_parameters(modules);
  Names named;
  const auto expect = [&](const std::string& list, const std::vector<at::Tensor>& tensors, const Names& known) {
    for (const auto& tensor : tensors) {
      const auto found = known.find(tensor.unsafeGetTensorImpl());
      if (!tensor.defined() || found == known.end()) throw UsageError(unknown(list, tensor, modules));
      const auto [first, is_new] = named.try_emplace(tensor.unsafeGetTensorImpl(), list);
      if (is_new) continue;
      throw UsageError("'{}' is named twice, in ShardOptions::{} and in ShardOptions::{}; name it once", found->second, first->second,
                       list);
    }
  };
  expect("ignored", options.ignored, with_buffers(parameters, modules));
  expect("replicated", options.replicated, parameters);
  expect("left_out", options.left_out, parameters);
}

void remember_ignored(const at::Tensor& parameter, const std::string& name, const std::shared_ptr<Schedule>& model) {
  auto& [mutex, known, sweep] = ignored_parameters();
  const std::lock_guard lock(mutex);
  sweep(known, [](const auto& entry) { return entry.second.first.expired() || entry.second.second.model.expired(); });
  known.insert_or_assign(parameter.unsafeGetTensorImpl(), std::pair(WeakTensor(parameter), Ignored{.name = name, .model = model}));
}

std::optional<Ignored> find_ignored(const at::Tensor& parameter) {
  auto& [mutex, known, sweep] = ignored_parameters();
  const std::lock_guard lock(mutex);
  const auto found = known.find(parameter.unsafeGetTensorImpl());
  if (found == known.end() || found->second.first.expired() || found->second.second.model.expired()) return std::nullopt;
  return found->second.second;
}

void note_averaged(const at::Tensor& parameter) {
  auto& [mutex, known, sweep] = ignored_parameters();
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(parameter.unsafeGetTensorImpl()); found != known.end()) found->second.second.averaged = true;
}

ShardOptions options_for(std::span<Module* const> modules, ShardOptions options) {
  const auto known = with_buffers(free_parameters(modules), modules);
  for (auto* list : {&options.ignored, &options.replicated, &options.left_out}) {
    std::erase_if(*list, [&](const at::Tensor& tensor) { return !known.contains(tensor.unsafeGetTensorImpl()); });
  }
  return options;
}

}  // namespace tessera
