#include "tessera/shard/unit_node.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/shard/marker.h"
#include "tessera/shard/schedule.h"
#include "tessera/shard/unit.h"

namespace tessera {
namespace {

namespace ag = torch::autograd;

at::ScalarType reduce_dtype(const Unit::Group& group, const MixedPrecision& precision) {
  if (precision.reduce_dtype) return *precision.reduce_dtype;
  return at::isFloatingType(group.dtype) ? at::promoteTypes(group.full_dtype, at::kFloat) : group.dtype;
}

class UnitNode final : public ag::Node {
 public:
  // The highest sequence number: a ready node runs before all others, so a unit is reduced as soon as its gradients are complete.
  explicit UnitNode(std::shared_ptr<Unit> unit) : ag::Node(UINT64_MAX), unit_(std::move(unit)) {
    for (auto& group : unit_->groups()) {
      std::vector<Unit::Parameter*> trained;
      for (auto& parameter : group.parameters) {
        if (!parameter.shard.requires_grad()) continue;
        add_input_metadata(at::Tensor(parameter.full.lock()));
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
    const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
    const auto schedule = unit_->schedule();
    const auto lock = schedule->lock();
    ag::variable_list results;
    size_t input = 0;
    for (auto& [group, parameters] : inputs_) {
      reduce(*group, parameters, std::span(gradients).subspan(input, parameters.size()), results);
      input += parameters.size();
    }
    gradients.clear();
    unit_->count_reduction();
    unit_->bait_old_optimizers();
    schedule->reduced(*unit_);
    return results;
  }

 private:
  void reduce(Unit::Group& group, std::span<Unit::Parameter* const> parameters, std::span<at::Tensor> gradients,
              ag::variable_list& results) {
    const auto& mesh = unit_->mesh();
    const auto dtype = reduce_dtype(group, unit_->options().mixed_precision);
    const auto options = group.own.options().dtype(dtype);
    const auto whole = at::zeros({group.chunk * mesh.shard().size()}, options);
    for (size_t i = 0; i < gradients.size(); i++) {
      auto& gradient = gradients[i];
      if (!gradient.defined()) continue;
      const auto& parameter = *parameters[i];
      whole.as_strided(parameter.sizes, parameter.strides, parameter.span.offset)
          .copy_(gradient.is_sparse() ? gradient.to_dense() : gradient);
    }
    const auto storage = marked_storage(Role::Gradient, unit_, static_cast<size_t>(group.chunk) * c10::elementSize(group.dtype),
                                        group.own.device(), Allocate::Now);
    const auto own = flat_view(storage, group.dtype);
    const Piece piece{.whole = whole, .own = own};
    mesh.shard().reduce_scatter(std::span(&piece, 1), {.op = Reduce::Mean}, {.unit = unit_->name()}).wait();
    if (mesh.replicate().size() > 1) mesh.replicate().all_reduce(own, {.op = Reduce::Mean}, {.unit = unit_->name()}).wait();

    for (size_t i = 0; i < gradients.size(); i++) {
      const auto& parameter = *parameters[i];
      // A parameter that the step did not use keeps its lack of a gradient; one that was frozen meanwhile gets none.
      if (!gradients[i].defined() || !parameter.shard.requires_grad()) {
        results.emplace_back();
      } else {
        results.push_back(
            paged_view(storage, group.dtype, parameter.shard.sizes(), parameter.shard.strides(), parameter.span.shard_offset));
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
      const at::Tensor full(parameter.full.lock());
      if (parameter.shard.requires_grad()) {
        ag::impl::set_gradient_edge(full, ag::Edge(node, input++));
      } else {
        ag::impl::set_gradient_edge(full, ag::Edge());
        full.set_requires_grad(false);
        full.unsafeGetTensorImpl()->mutable_grad() = at::Tensor();
      }
    }
  }
}

}  // namespace tessera
