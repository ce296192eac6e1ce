// TrainedBeside: looks through the graph for leaves that are in no unit.
#include "tessera/shard/gradients/gradient_watch.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "tessera/base/paging_key.h"
#include "tessera/comm/calling.h"
#include "tessera/shard/unit/fingerprint.h"
#include "tessera/shard/unit/ignored_parameters.h"

namespace tessera {
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
  if (nodes == nullptr || asks_for_chosen_gradients()) return;  // the program takes the gradients that it has asked for
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
  uint64_t hash = 0;  // does not depend on the order, because a graph has its nodes in none
  for (auto& leaf : leaves_) {
    const auto tensor = leaf.tensor.lock();
    if (!tensor.defined() || !std::has_single_bit(leaf.passes++)) continue;
    const auto values = fingerprint(tensor.detach());  // the version stays the same if an optimizer writes tensor.data()
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
