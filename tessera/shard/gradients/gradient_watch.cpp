#include "tessera/shard/gradients/gradient_watch.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "tessera/base/log.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/unit/ignored_parameters.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

// The number of passes before the warning: more than a short test or a tutorial takes.
constexpr int kEnough = 20;

/// Some values of a flat tensor, from all over it.
at::Tensor sample(const at::Tensor& flat) {
  constexpr int64_t kValues = 32;
  const auto step = std::max<int64_t>(1, flat.numel() / kValues);
  return flat.slice(0, 0, std::min(flat.numel(), kValues * step), step).to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

void EqualBatches::keep(const Unit& unit, const at::Tensor& gradients) {
  if (!world_.is_first() || !world_.traits().can_differ() || !gradients.is_cpu()) return close();
  if (!same_ranks(unit.mesh().world(), world_)) return;
  seen_[&unit].own = sample(gradients);
}

void EqualBatches::compare(const Unit& unit, const at::Tensor& mean) {
  const auto found = seen_.find(&unit);
  if (found == seen_.end() || !found->second.own.defined()) return;
  auto& seen = found->second;
  const auto own = std::exchange(seen.own, {}), all = sample(mean);
  if (own.sizes() != all.sizes() || !own.any().item<bool>()) return;
  // The sum of equal values may be rounded.
  constexpr double kRounding = 1e-5;
  if (!at::allclose(all, own, kRounding, 0)) return close();
  if (++seen.times < kEnough) return;
  log(LogLevel::Warning,
      fmt::format("all {} ranks have had the same gradients in {} backward passes, so each gets the same batches, and all ranks together "
                  "learn no more than one: give each rank its own part of the data, as tessera::data::Sampler does",
                  unit.mesh().world().size(), kEnough));
  close();
}

void EqualBatches::close() {
  is_open_ = false;
  seen_.clear();
}

EarlierGradients::Left EarlierGradients::left_in(const at::Tensor& shard) {
  const auto& gradient = shard.grad();
  if (!shard.requires_grad() || !gradient.defined() || gradient.is_inference()) return {};
  return {.gradient = WeakTensor(gradient), .version = gradient._version()};
}

std::string EarlierGradients::note_reduction(const Unit& unit) {
  auto& known = known_[&unit];
  known.has_new = true;
  size_t place = 0, kept = 0;
  uint64_t which = 0;
  for (const auto& parameter : parameters_of(unit)) {
    if (place == known.left.size()) break;
    const auto& left = known.left[place++];
    const auto gradient = left.gradient.lock();
    if (!gradient.defined() || !gradient.is_same(parameter.shard.grad()) || gradient._version() != left.version) continue;
    kept++;
    which = which * 31 + place;
  }
  return kept == 0 ? std::string() : fmt::format(", added to {} {} #{:x}", kept, kEarlierGradients, which & 0xffff);
}

void EarlierGradients::note_end_of_pass() {
  for (auto& [unit, known] : known_) {
    if (!std::exchange(known.has_new, false)) continue;
    known.left.clear();
    for (const auto& parameter : parameters_of(*unit)) known.left.push_back(left_in(parameter.shard));
  }
}

namespace {

namespace ag = torch::autograd;

/// The leaf whose gradient a node of a graph accumulates, if it is in no unit and in no ShardOptions::ignored; else undefined.
at::Tensor leaf_outside(ag::Node* node) {
  const auto* const accumulate = dynamic_cast<const ag::AccumulateGrad*>(node);
  if (accumulate == nullptr || !accumulate->variable.defined()) return {};
  const auto& leaf = accumulate->variable;
  const bool is_ordinary = !leaf.key_set().has(kPagingKey) && leaf.layout() == at::kStrided && !leaf.is_inference();
  return is_ordinary && !find_ignored(leaf) ? leaf : at::Tensor();
}

}  // namespace

bool asks_for_chosen_gradients() {
  const auto* const chosen = ag::get_current_graph_task_exec_info();
  return chosen != nullptr && !chosen->empty();
}

TrainedBeside::TrainedBeside(Communicator world) : world_(std::move(world)), is_open_(world_.traits().can_differ()) {}

void TrainedBeside::look_at_graph() {
  const auto graph = ag::get_current_graph_task_id();
  if (!is_open_ || graph == graph_) return;
  graph_ = graph;
  words_.clear();
  const auto* const nodes = ag::get_current_graph_task_nodes_in_graph();
  // With chosen gradients, the program gets the gradients that it has asked for, and no leaf accumulates any.
  if (nodes == nullptr || asks_for_chosen_gradients()) return;
  if (nodes->size() != nodes_) {
    nodes_ = nodes->size();
    std::erase_if(leaves_, [](const Leaf& known) { return known.tensor.expired(); });
    for (auto* node : *nodes) {
      const auto leaf = leaf_outside(node);
      const auto is_leaf = [&](const Leaf& known) { return known.tensor.lock().is_same(leaf); };
      if (!leaf.defined() || std::ranges::any_of(leaves_, is_leaf)) continue;
      leaves_.push_back({.tensor = WeakTensor(leaf), .values = fingerprint(leaf.detach())});
    }
  }
  if (!leaves_.empty()) words_ = describe_changes();
}

std::string TrainedBeside::describe_changes() {
  at::Tensor largest;
  int found = 0;
  uint64_t hash = 0;  // does not depend on the order of leaves, because the nodes of a graph are unordered
  for (auto& leaf : leaves_) {
    const auto tensor = leaf.tensor.lock();
    if (!tensor.defined() || !std::has_single_bit(leaf.passes++)) continue;
    // Reads the values, because the version does not change if an optimizer writes tensor.data().
    const auto values = fingerprint(tensor.detach());
    if (std::exchange(leaf.values, values) == values) continue;
    found++;
    hash += values * static_cast<uint64_t>(tensor.numel() + 1);
    const auto size_of = [](const at::Tensor& each) { return std::pair(each.numel(), each.sizes().vec()); };
    if (!largest.defined() || size_of(tensor) > size_of(largest)) largest = tensor;
  }
  if (found == 0) return {};
  const auto others = found == 1 ? std::string() : fmt::format(" and {} more", found - 1);
  return fmt::format("{}a tensor of shape [{}]{} #{:x}", kBeside, fmt::join(largest.sizes(), ", "), others, hash);
}

}  // namespace tessera
