// The parameters that a caller of fully_shard names one by one, because they are not sharded with the rest of their module.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Schedule;

bool is_in(std::span<const at::Tensor> tensors, const at::Tensor& tensor);

/// Throws UsageError unless each tensor in `ignored`, `replicated` and `left_out` is a parameter of the modules, in no unit yet, and named
/// only once. Buffers may be ignored, too.
void expect_named_once(std::span<torch::nn::Module* const> modules, const ShardOptions& options);

/// A parameter in ShardOptions::ignored.
struct Ignored {
  std::string name;  // the name in the largest module that fully_shard has seen so far
  std::weak_ptr<Schedule> model;
  bool averaged = false;  // all ranks have had the same gradient for it, other than zero, so the program averages its gradients
};
/// Remembers an ignored parameter, or updates its name and model when it has become part of a larger model.
void remember_ignored(const at::Tensor& parameter, const std::string& name, const std::shared_ptr<Schedule>& model);
/// Returns nothing if the tensor is not an ignored parameter, or if its model has been destroyed.
std::optional<Ignored> find_ignored(const at::Tensor& parameter);
void note_averaged(const at::Tensor& parameter);

/// The options for a part of a model: `ignored`, `replicated` and `left_out` keep only tensors that expect_named_once accepts for these
/// modules.
ShardOptions options_for(std::span<torch::nn::Module* const> modules, ShardOptions options);

}  // namespace tessera
