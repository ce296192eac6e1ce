// Activation checkpointing: segments of a model keep only their inputs, and run again in backward to recompute what autograd needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/no_copy.h"
#include "tessera/shard/activation_options.h"
#include "tessera/shard/tensors.h"

namespace torch::nn {
class Module;
}

namespace tessera::activation {

class SegmentPass;

/// Returns a rule that keeps the results of these operators. Throws UsageError if libtorch has no operator of one of the names.
KeepRule operators(std::vector<std::string> names);

namespace detail {

at::Tensor placeholder();
/// Always throws UsageError: a segment has to copy its inputs, because backward runs it again with them.
[[noreturn]] void refuse_inputs();

/// The type by which a recomputation passes the copy of an input: a reference to an lvalue or an rvalue, as the caller passed the original.
template <class T>
using Passed = std::conditional_t<std::is_same_v<std::remove_cvref_t<T>, std::decay_t<T>>, T&&, std::decay_t<T>&>;

/// A function that calls `module`. A recomputation checks that the call leaves the module's buffers unchanged.
template <class Call>
struct CallOf {
  const torch::nn::Module* module;
  Call call;
  template <class... Values>
  decltype(auto) operator()(Values&&... values) const {
    return call(std::forward<Values>(values)...);
  }
};
template <class Call>
CallOf(const torch::nn::Module*, Call) -> CallOf<Call>;
template <class Run>
const torch::nn::Module* module_of(const Run& /*run*/) {
  return nullptr;
}
template <class Call>
const torch::nn::Module* module_of(const CallOf<Call>& run) {
  return run.module;
}

/// Marks that this thread runs a segment, as long as the object exists.
class RunningSegment : NoCopy {
 public:
  RunningSegment(const Options& options, Tensors inputs, Again again, const torch::nn::Module* module);
  ~RunningSegment();
  /// Called for each tensor that the segment returns; may replace the tensor.
  void result(at::Tensor& tensor) const;

 private:
  const std::unique_ptr<SegmentPass> pass_;
};

}  // namespace detail

/// Returns whether this thread runs a checkpointed segment again, in backward. With it, a module can limit side effects outside of libtorch
/// to the forward pass: `if (!activation::is_recompute()) calls++`.
bool is_recompute();

/// A module holder, or a shared_ptr to a module.
template <class T>
concept IsModule = requires(const std::remove_cvref_t<T>& module) { module->named_parameters(); };

/// Calls run(inputs...) without keeping its activations; backward calls it again to recompute them. Copies `run` and the inputs that are
/// not tensors. Results and gradients equal those of a plain call to the bit, except for random numbers that cuDNN draws in recurrent
/// modules. Finds tensors in inputs and results as for_each_tensor_in does. Segments may nest, contain parts of a sharded unit or several
/// units, and be differentiated twice. If gradients are disabled, this is a plain call.
template <class Run, class... Inputs>
  requires(!IsModule<Run>)
auto checkpoint(const Options& options, Run&& run, Inputs&&... inputs) {
  static_assert((std::is_copy_constructible_v<std::decay_t<Inputs>> && ...), "inputs of a checkpointed segment must be copyable: pass a pointer");
  if (!c10::GradMode::is_enabled()) return run(std::forward<Inputs>(inputs)...);
  // The copies hold placeholders for the input tensors; the segment keeps the tensors themselves.
  const auto kept = std::make_shared<std::tuple<std::decay_t<Inputs>...>>(inputs...);
  detail::Tensors tensors;
  for_each_tensor_in(*kept, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, detail::placeholder())); });
  auto again = [run = std::decay_t<Run>(run), kept](const detail::Tensors& fresh) {
    auto same = run;
    auto values = *kept;
    size_t next = 0;
    for_each_tensor_in(values, [&](at::Tensor& tensor) { tensor = fresh.at(next++); });
    std::apply([&](auto&... value) { same(static_cast<detail::Passed<Inputs>>(value)...); }, values);
  };
  const detail::RunningSegment segment(options, std::move(tensors), std::move(again), detail::module_of(run));
  using Output = std::remove_cvref_t<decltype(run(std::forward<Inputs>(inputs)...))>;
  if constexpr (std::is_void_v<Output>) {
    run(std::forward<Inputs>(inputs)...);
  } else {
    Output output = run(std::forward<Inputs>(inputs)...);
    for_each_tensor_in(output, [&](at::Tensor& tensor) { segment.result(tensor); });
    return output;
  }
}

template <class Run, class... Inputs>
  requires(!IsModule<Run> && !std::is_same_v<std::remove_cvref_t<Run>, Options>)
auto checkpoint(Run&& run, Inputs&&... inputs) {
  return checkpoint(Options{}, std::forward<Run>(run), std::forward<Inputs>(inputs)...);
}

}  // namespace tessera::activation
