#include "tessera/shard/unit/unit_node.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

namespace ag = torch::autograd;

/// Gradients come in the dtype of the whole parameters, and are added in at least float32: what is narrower needs no widening on its way.
at::ScalarType wire_dtype(const Unit::Group& group, const MixedPrecision& precision) {
  const auto wanted = precision.reduce_dtype.value_or(group.unsharded_dtype);
  return c10::elementSize(wanted) < c10::elementSize(group.unsharded_dtype) ? wanted : group.unsharded_dtype;
}

/// A module that was taken out of the model has let go of its parameters.
bool trains(const Unit::Parameter& parameter) {
  const at::Tensor unsharded(parameter.unsharded.lock());
  return unsharded.defined() && unsharded_meta(unsharded)->requires_grad();
}

class UnitNode final : public ag::Node {
 public:
  // The highest sequence number: a ready node runs before all others, so a unit is reduced as soon as its gradients are complete.
  explicit UnitNode(std::shared_ptr<Unit> unit) : ag::Node(UINT64_MAX), unit_(std::move(unit)) {
    for (auto& group : unit_->groups()) {
      std::vector<Unit::Parameter*> trained;
      for (auto& parameter : group.parameters) {
        if (!trains(parameter)) continue;
        add_input_metadata(at::Tensor(parameter.unsharded.lock()));
        add_next_edge(ag::impl::gradient_edge(parameter.shard));
        trained.push_back(&parameter);
      }
      if (!trained.empty()) inputs_.emplace_back(&group, std::move(trained));
    }
  }

  std::string name() const override { return "tessera::UnitNode"; }

  ag::variable_list apply(ag::variable_list&& gradients) override {
    if (c10::GradMode::is_enabled()) {
      throw UsageError(
          fmt::format("unit '{}': gradients of parameters that can be differentiated again (create_graph) are not available when "
                      "the parameters are sharded; differentiate with respect to inputs instead, that works",
                      unit_->name()));
    }
    const auto& schedule = unit_->schedule();
    run_hooks(gradients);
    const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
    const auto lock = schedule->lock();
    unit_->finish_reduction();  // of a pass that has not ended yet
    const auto room = unit_->gradient_room(plans());
    c10::SmallVector<Unit::Group*, 2> groups;
    for (size_t i = 0, input = 0; i < inputs_.size(); input += inputs_[i++].second.size()) {
      const auto& [group, parameters] = inputs_[i];
      pack(room.wholes[i], parameters, std::span(gradients).subspan(input));
      unit_->gradient_memory(*group);
      groups.push_back(group);
    }
    schedule->finish_reductions();  // of the unit before: what it had to be told is agreed on before this one says anything
    const bool all = std::ranges::all_of(gradients, [](const at::Tensor& gradient) { return gradient.defined(); });
    const auto partial = all ? std::string() : name_of_used(gradients);
    unit_->start_reduction(groups, room.wholes, all ? std::string_view(unit_->name()) : partial, used(gradients));
    schedule->reduces(*unit_);
    ag::variable_list results;
    results.reserve(gradients.size());
    for (const auto& [group, parameters] : inputs_) hand_on(group->gradient.storage, parameters, gradients, results);
    gradients.clear();
    return results;
  }

 private:
  /// Before this rank's gradients lose themselves in the mean, as they would before they are accumulated in a leaf.
  void run_hooks(ag::variable_list& gradients) const {
    size_t input = 0;
    for (const auto& [group, parameters] : inputs_) {
      for (const auto* parameter : parameters) {
        auto& gradient = gradients[input++];
        const at::Tensor unsharded(parameter->unsharded.lock());
        if (gradient.defined() && unsharded.defined()) gradient = unsharded_meta(unsharded)->run_hooks(std::move(gradient));
        if (group->flat && !gradient.defined()) refuse_gap(*parameter);
      }
    }
  }

  /// In one vector what has no gradient would have one of zeros, and an optimizer would move it.
  [[noreturn]] void refuse_gap(const Unit::Parameter& parameter) const {
    throw UsageError(fmt::format(
        "unit '{}' is listed flat, and this backward pass did not use '{}', which an optimizer over one vector would move all the "
        "same; shard with tessera::Listing::ByName",
        unit_->name(), parameter.name));
  }

  c10::SmallVector<GradientPlan, 2> plans() const {
    c10::SmallVector<GradientPlan, 2> result;
    for (const auto& [group, parameters] : inputs_) {
      result.push_back({.numel = group->chunk * unit_->mesh().shard().size(),
                        .dtype = wire_dtype(*group, unit_->options().mixed_precision),
                        .device = group->own.device()});
    }
    return result;
  }

  /// The gradients of a group, and zeros where it has none.
  void pack(const at::Tensor& whole, std::span<Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients) const {
    int64_t end = 0;
    const auto fill_gap = [&](int64_t begin) {
      if (begin > end) whole.narrow(0, end, begin - end).zero_();
    };
    for (size_t i = 0; i < parameters.size(); i++) {
      const auto& gradient = gradients[i];
      if (!gradient.defined()) continue;
      const auto& parameter = *parameters[i];
      fill_gap(parameter.span.offset);
      unit_->pack(whole.as_strided(parameter.sizes, parameter.strides, parameter.span.offset),
                  gradient.is_sparse() ? gradient.to_dense() : gradient);
      end = parameter.span.offset + parameter.span.numel;
    }
    fill_gap(whole.numel());
  }

  /// The unit, and what of it this step did not use: ranks that used different parts would update a parameter in part. They get an error.
  std::string name_of_used(std::span<const at::Tensor> gradients) {
    auto text = unit_->name();
    size_t input = 0;
    for (const auto& [group, parameters] : inputs_) {
      for (const auto* parameter : parameters) {
        if (!gradients[input++].defined()) text += (text.size() == unit_->name().size() ? " without " : ", ") + parameter->name;
      }
    }
    return text;
  }

  /// The same as a number, since a text on its way may be cut short.
  static uint64_t used(std::span<const at::Tensor> gradients) {
    uint64_t hash = 0;
    for (const auto& gradient : gradients) hash = hash * 31 + (gradient.defined() ? 1 : 2);
    return hash;
  }

  void hand_on(const c10::Storage& storage, std::span<Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients,
               ag::variable_list& results) {
    const at::Tensor* last = nullptr;
    auto& tag = *tag_of(*storage.unsafeGetStorageImpl());
    tag.squares.reset();
    tag.members = 0;
    for (const auto* parameter : parameters) {
      const auto& shard = parameter->shard;
      // A parameter that the step did not use keeps its lack of a gradient; one that was frozen meanwhile gets none. Where all have one
      // shard, it gets its gradient once.
      const bool wanted = gradients[results.size()].defined() && shard.requires_grad() && (last == nullptr || !last->is_same(shard));
      if (wanted) {
        last = &shard;
        results.push_back(paged_view(storage, shard));
        tag.members += place_hash(results.back());
      } else {
        // What is added up, but handed to nobody, is in nobody's norm.
        if (gradients[results.size()].defined() && !shard.requires_grad()) tag.members++;
        results.emplace_back();
      }
    }
  }

  std::shared_ptr<Unit> unit_;
  std::vector<std::pair<Unit::Group*, std::vector<Unit::Parameter*>>> inputs_;
};

}  // namespace

void attach_unit_node(const std::shared_ptr<Unit>& unit) {
  const compat::NodePtr node = compat::make_node<UnitNode>(unit);
  uint32_t input = 0;
  for (auto& group : unit->groups()) {
    for (auto& parameter : group.parameters) {
      const at::Tensor unsharded(parameter.unsharded.lock());
      if (!unsharded.defined()) continue;
      auto* const member = unsharded_meta(unsharded);
      member->attached = member->requires_grad();
      ag::impl::set_gradient_edge(unsharded, member->attached ? ag::Edge(node, input++) : ag::Edge());
    }
  }
}

}  // namespace tessera
