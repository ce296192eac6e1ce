#include "tessera/shard/backward/unit_node.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/gradients/gradient_reduction.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

namespace ag = torch::autograd;

/// Reduces the gradients of a unit and passes them on to the shards.
class UnitBackward {
 public:
  explicit UnitBackward(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {
    for (const auto& group : unit_->groups()) {
      std::vector<const Unit::Parameter*> trained;
      for (const auto& parameter : group.parameters) {
        if (trains(parameter)) trained.push_back(&parameter);
      }
      if (trained.empty()) continue;
      parameters_.insert(parameters_.end(), trained.begin(), trained.end());
      groups_.push_back(&group);
      trained_.push_back(std::move(trained));
    }
  }

  Unit& unit() const { return *unit_; }
  /// The trained parameters. Lists of gradients have one gradient for each trained parameter.
  std::span<const Unit::Parameter* const> parameters() const { return parameters_; }

  void keep_for_later(ag::variable_list& gradients) {
    const BelowPaging below;
    LockedState(*unit_)->reduction.unsynced.add(parameters_, gradients);
  }

  /// Reduces gradients outside of a call by the autograd engine, and treats the results as the engine does: runs hooks and accumulates.
  void reduce_and_accumulate(ag::variable_list gradients) {
    gradients.resize(parameters_.size());
    for (size_t i = 0; unit_->schedule()->reduces_in_order() && i < gradients.size(); i++) {
      if (!gradients[i].defined()) gradients[i] = zeros_like(*parameters_[i], unit_->device());
    }
    auto results = reduce(gradients);
    LockedState(*unit_)->reduction.finish();
    for (size_t i = 0; i < results.size(); i++) {
      if (!results[i].defined()) continue;
      // The edge keeps its function alive, which nothing else owns if there is no graph.
      const auto edge = ag::impl::gradient_edge(parameters_[i]->shard);
      auto& accumulate = *edge.function;
      ag::variable_list gradient;
      gradient.push_back(std::move(results[i]));
      for (const auto& hook : accumulate.tensor_pre_hooks()) gradient = (*hook)(gradient);
      accumulate(std::move(gradient));
    }
  }

  /// Starts to reduce the gradients, together with unsynced gradients of earlier passes. Returns the gradients of the shards.
  ag::variable_list reduce(ag::variable_list& gradients) {
    const auto& schedule = unit_->schedule();
    const BelowPaging below;
    const LockedState state(*unit_);
    auto& reduction = state->reduction;
    const auto sink = reduction.sink();
    if (sink) schedule->expect_writable(*unit_);
    reduction.finish();
    const bool sums = reduction.unsynced.may_exist() || schedule->reduces_in_order();
    reduction.unsynced.add_to(parameters_, gradients);
    if (unit_->memory().gradients->packs_after_sum()) schedule->finish_reductions();
    auto packing = reduction.begin(groups_, sums);
    for (size_t i = 0, input = 0; i < groups_.size(); input += trained_[i++].size()) {
      const auto some = std::span(gradients).subspan(input, trained_[i].size());
      if (groups_[i]->flat) expect_no_gap(trained_[i], some);
      packing.pack(i, trained_[i], some);
    }
    schedule->finish_sum();  // errors of the previous unit's reduction appear before this unit communicates
    const bool all = std::ranges::all_of(gradients, [](const at::Tensor& gradient) { return gradient.defined(); });
    const auto partial = all ? std::string() : name_of_used(gradients);
    packing.start(all ? std::string_view(unit_->name()) : partial, used(gradients));
    ag::variable_list results;
    results.reserve(gradients.size());
    if (!reduction.gives_gradients()) results.resize(gradients.size());
    for (size_t i = 0; reduction.gives_gradients() && i < groups_.size(); i++) {
      if (auto* target = reduction.target(*groups_[i])) {
        hand_on(*target, trained_[i], gradients, sink.get(), results);
      } else {
        results.resize(results.size() + trained_[i].size());
      }
    }
    gradients.clear();
    return results;
  }

  /// Runs the hooks on unsharded parameters. They see this rank's gradients before these become part of the mean.
  void run_hooks(ag::variable_list& gradients) const {
    for (size_t i = 0; i < gradients.size(); i++) {
      const auto unsharded = parameters_[i]->unsharded.lock();
      if (gradients[i].defined() && unsharded.defined()) gradients[i] = unsharded_meta(unsharded)->run_hooks(std::move(gradients[i]));
    }
  }

 private:
  /// In a flat shard, a parameter without a gradient would have a gradient of zeros, and optimizers with momentum or weight decay would
  /// change it.
  void expect_no_gap(std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients) const {
    for (size_t i = 0; i < parameters.size(); i++) {
      if (gradients[i].defined()) continue;
      throw UsageError(
          "unit '{}' is listed flat (tessera::Listing::Flat): its parameters are one vector, so an optimizer would change '{}' with the "
          "others, although this backward pass did not use it; use it in every pass, or shard with tessera::Listing::ByName",
          unit_->name(), parameters[i]->name);
    }
  }

  /// The name of the unit with the parameters that this pass did not use. Ranks that used different parameters get an error with this name,
  /// because only some parts of a parameter would be updated.
  std::string name_of_used(std::span<const at::Tensor> gradients) {
    auto text = unit_->name();
    for (size_t i = 0; i < gradients.size(); i++) {
      if (!gradients[i].defined()) text += (text.size() == unit_->name().size() ? " without " : ", ") + parameters_[i]->name;
    }
    return text;
  }

  /// A hash of the parameters and of which of them this pass used. The name alone is not enough: messages may truncate it, and it does not
  /// say which parameters are frozen.
  uint64_t used(std::span<const at::Tensor> gradients) const {
    uint64_t hash = 0;
    for (size_t i = 0; i < gradients.size(); i++)
      hash = hash * 31 + std::hash<std::string>()(parameters_[i]->name) + (gradients[i].defined() ? 1 : 2);
    return hash;
  }

  /// Appends the gradients of the shards, which are views of the storage, to `results`, except for those that a sink takes.
  void hand_on(TaggedStorage& storage, std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients,
               const GradientSink* sink, ag::variable_list& results) {
    const at::Tensor* last = nullptr;
    auto& tag = storage.tag;
    const c10::Storage memory(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage));
    tag.squares.reset();
    tag.members = 0;
    for (const auto* parameter : parameters) {
      const auto& shard = parameter->shard;
      // A parameter gets no gradient if the pass did not use it or if it has been frozen since. With Listing::Flat all parameters have the
      // same shard, which gets its gradient once.
      const bool taken = !shard.requires_grad() || (sink != nullptr && sink->takes(shard));
      const bool wanted = gradients[results.size()].defined() && !taken && (last == nullptr || !last->is_same(shard));
      if (wanted) {
        last = &shard;
        results.push_back(paged_view(memory, shard, unit_->groups()[tag.group].gradient_dtype));
        tag.members += place_hash(results.back());
      } else {
        // This gradient is part of the sum of squares, but no shard gets it, so `members` is changed to a value that matches no set of
        // gradients.
        if (gradients[results.size()].defined() && taken) tag.members++;
        results.emplace_back();
      }
    }
  }

  std::shared_ptr<Unit> unit_;
  std::vector<const Unit::Group*> groups_;                    // the groups with trainable parameters
  std::vector<std::vector<const Unit::Parameter*>> trained_;  // the trained parameters of each of groups_
  std::vector<const Unit::Parameter*> parameters_;            // the trained parameters of all groups
};

[[noreturn]] void refuse_second_derivative(const std::string& unit) {
  throw UsageError(
      "unit '{}': gradients of parameters that can be differentiated again (create_graph) are not available when the parameters "
      "are sharded; differentiate with respect to inputs instead, which works",
      unit);
}

/// The gradient function of gradients that were asked for with create_graph. Refuses only when backward calls it, because a program may
/// differentiate only with respect to inputs.
class ReducedOnce final : public ag::Node {
 public:
  ReducedOnce(std::string unit, ag::edge_list shards) : ag::Node(std::move(shards)), unit_(std::move(unit)) {}
  std::string name() const override { return "tessera::ReducedOnce"; }
  ag::variable_list apply(ag::variable_list&& /*gradients*/) override { refuse_second_derivative(unit_); }

 private:
  const std::string unit_;
};

class UnitNode final : public ag::Node {
 public:
  // The engine runs the ready node with the highest sequence number first. UINT64_MAX therefore reduces a unit as soon as its gradients are
  // complete.
  explicit UnitNode(const std::shared_ptr<Unit>& unit) : ag::Node(UINT64_MAX), backward_(std::make_shared<UnitBackward>(unit)) {
    for (const auto* parameter : backward_->parameters()) {
      add_input_metadata(parameter->unsharded.lock());
      add_next_edge(ag::impl::gradient_edge(parameter->shard));
    }
  }

  std::string name() const override { return "tessera::UnitNode"; }

  ag::variable_list apply(ag::variable_list&& gradients) override {
    auto& unit = backward_->unit();
    const bool makes_graph = c10::GradMode::is_enabled();
    const auto& schedule = unit.schedule();
    backward_->run_hooks(gradients);
    const c10::AutoGradMode no_grad(false);
    const LockedState state(unit);
    const bool syncs = state->settings.syncs();
    if (makes_graph && (!syncs || schedule->reduces_in_order())) refuse_second_derivative(unit.name());
    if (!syncs) {
      backward_->keep_for_later(gradients);
      schedule->gradients_complete(unit);
      return ag::variable_list(num_inputs());
    }
    schedule->look_at_graph();  // only in passes with a reduction, in which ranks compare the changes that it finds
    if (schedule->reduces_in_order()) {
      if (asks_for_chosen_gradients()) {
        throw UsageError(
            "unit '{}': with UnusedParameters::Zeros, gradients are accumulated in the shards; they can't be asked for by "
            "autograd::grad or by backward with inputs",
            unit.name());
      }
      schedule->gradients_complete(unit);
      schedule->reduce_in_order(unit, [backward = backward_, gradients = std::move(gradients)]() mutable {
        backward->reduce_and_accumulate(std::move(gradients));
      });
      return ag::variable_list(num_inputs());
    }
    auto results = backward_->reduce(gradients);
    schedule->gradients_complete(unit);
    if (makes_graph) refuse_to_differentiate(results, unit.name());
    return results;
  }

 private:
  void refuse_to_differentiate(ag::variable_list& results, const std::string& unit) const {
    const compat::NodePtr node = compat::make_node<ReducedOnce>(unit, next_edges());
    for (const auto& result : results) {
      if (result.defined()) ag::impl::set_gradient_edge(result, ag::Edge(node, node->add_input_metadata(result)));
    }
  }

  const std::shared_ptr<UnitBackward> backward_;
};

}  // namespace

void reduce_unsynced(Unit& unit) {
  UnitBackward backward(unit.shared_from_this());
  const LockedState state(unit);
  if (!backward.parameters().empty() || !state->reduction.unsynced.empty()) backward.reduce_and_accumulate({});
}

void follow_training(Unit& unit, const at::Tensor& used) {
  const auto agrees = [](const UnshardedMeta* meta) { return meta == nullptr || meta->requires_grad() == meta->attached; };
  auto& followed = unit.flags().followed_pass;
  const auto pass = unit.schedule()->pass_number();
  if (followed == pass && agrees(unsharded_meta(used))) return;
  const auto held = unit.schedule()->lock();
  followed = pass;
  for (const auto& parameter : parameters_of(unit)) {
    const auto unsharded = parameter.unsharded.lock();
    if (unsharded.defined() && !agrees(unsharded_meta(unsharded))) return attach_unit_node(unit.shared_from_this());
  }
}

void attach_unit_node(const std::shared_ptr<Unit>& unit) {
  const compat::NodePtr node = compat::make_node<UnitNode>(unit);
  uint32_t input = 0;
  for (const auto& parameter : parameters_of(*unit)) {
    const auto unsharded = parameter.unsharded.lock();
    if (!unsharded.defined()) continue;
    auto* const meta = unsharded_meta(unsharded);
    meta->attached = meta->requires_grad();
    ag::impl::set_gradient_edge(unsharded, meta->attached ? ag::Edge(node, input++) : ag::Edge());
  }
}

}  // namespace tessera
