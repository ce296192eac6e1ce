#include "tessera/nn/collectives.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"

namespace tessera::nn {
namespace {

namespace ag = torch::autograd;

using Gradient = std::function<at::Tensor(const at::Tensor& gradient)>;

class CollectiveNode final : public ag::Node {
 public:
  explicit CollectiveNode(Gradient gradient) : gradient_(std::move(gradient)) {}
  std::string name() const override { return "tessera::Collective"; }
  ag::variable_list apply(ag::variable_list&& gradients) override {
    // A rank without a gradient takes part with zeros, because the other ranks wait for it.
    return {gradient_(gradients[0].defined() ? gradients[0] : input_metadata(0).zeros_like())};
  }

 private:
  const Gradient gradient_;
};

/// Returns the operand as an ordinary tensor. Copies a sharded parameter by clone(), which autograd records.
at::Tensor ordinary(const at::Tensor& tensor, std::string_view operation) {
  if (!tensor.defined()) throw UsageError("{} was given an undefined tensor", operation);
  if (!tensor.key_set().has(kPagingKey)) return tensor;
  auto copy = tensor.clone();
  if (!copy.key_set().has(kPagingKey)) return copy;
  throw UsageError(
      "{} was given a shard, its gradient, or a tensor computed from these: other ranks have other values of it at the same "
      "places; pass the module's own parameter, or tessera::to_local(tensor), an ordinary copy, if you mean this rank's part",
      operation);
}

/// Returns the dimension counted from 0; -1 is the last dimension.
int64_t dim_in(int64_t dim, const at::Tensor& tensor, std::string_view operation) {
  if (dim >= -tensor.dim() && dim < tensor.dim()) return dim < 0 ? dim + tensor.dim() : dim;
  throw UsageError("{} was given dimension {} of a tensor with sizes [{}]", operation, dim, joined(tensor.sizes()));
}

/// A name for the operation with the sizes in it. Ranks compare names before data moves; without the sizes, they would not notice different
/// shapes with equally many values.
std::string with_shape(std::string_view operation, const at::Tensor& tensor, std::optional<int64_t> dim = {}) {
  const auto along = dim ? fmt::format(" along {}", *dim) : "";
  return fmt::format("{} of {{{}}}{}", operation, fmt::join(tensor.sizes(), ", "), along);
}

at::Tensor with_gradient(const at::Tensor& operand, at::Tensor result, Gradient gradient) {
  if (!c10::GradMode::is_enabled() || !operand.requires_grad()) return result;
  const compat::NodePtr node = compat::make_node<CollectiveNode>(std::move(gradient));
  node->set_next_edges(ag::collect_next_edges(operand));
  const auto input = node->add_input_metadata(result);
  ag::impl::set_gradient_edge(result, ag::Edge(node, input));
  return result;
}

void expect_differentiable(const at::Tensor& tensor, Reduce op, std::string_view operation) {
  if (op == Reduce::Sum || op == Reduce::Mean || !c10::GradMode::is_enabled() || !tensor.requires_grad()) return;
  throw UsageError(
      "{} has no gradient for a minimum or maximum over ranks; pass tensor.detach(), or gather the values with "
      "tessera::nn::all_gather and call amin or amax",
      operation);
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, const Communicator& world, Reduce op) {
  const auto operand = ordinary(tensor, "nn::all_reduce");
  expect_differentiable(tensor, op, "nn::all_reduce");
  const auto result = operand.detach().clone(at::MemoryFormat::Contiguous);
  world.all_reduce(result, {.op = op}, {.unit = with_shape("nn::all_reduce", operand)}).wait();
  return with_gradient(operand, result, [world, op](const at::Tensor& gradient) { return all_reduce(gradient, world, op); });
}

at::Tensor all_gather(const at::Tensor& tensor, const Communicator& world, int64_t dim) {
  const auto operand = ordinary(tensor, "nn::all_gather");
  if (operand.dim() == 0) return all_gather(operand.reshape({1}), world, dim);
  const auto place = dim_in(dim, operand, "nn::all_gather");
  const auto own = operand.detach().contiguous();
  auto sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), world.size());
  const auto whole = at::empty(sizes, own.options());
  const Piece piece{.whole = whole, .own = own};
  world.all_gather(std::span(&piece, 1), {.unit = with_shape("nn::all_gather", operand, place)}).wait();
  const auto result = whole.movedim(0, place).contiguous().flatten(place, place + 1);
  return with_gradient(operand, result.detach(),
                       [world, place](const at::Tensor& gradient) { return reduce_scatter(gradient, world, Reduce::Sum, place); });
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const Communicator& world, Reduce op, int64_t dim) {
  const auto operand = ordinary(tensor, "nn::reduce_scatter");
  expect_differentiable(tensor, op, "nn::reduce_scatter");
  const auto place = dim_in(dim, operand, "nn::reduce_scatter");
  if (operand.size(place) % world.size() != 0) {
    throw UsageError("nn::reduce_scatter can't divide a dimension of size {} among {} ranks", operand.size(place), world.size());
  }
  const auto whole = operand.detach().unflatten(place, {world.size(), operand.size(place) / world.size()}).movedim(place, 0).contiguous();
  const auto result = at::empty(whole.sizes().slice(1), whole.options());
  const Piece piece{.whole = whole, .own = result};
  world.reduce_scatter(std::span(&piece, 1), {.op = op}, {.unit = with_shape("nn::reduce_scatter", operand, place)}).wait();
  return with_gradient(operand, result, [world, op, place](const at::Tensor& gradient) {
    return all_gather(op == Reduce::Mean ? gradient / world.size() : gradient, world, place);
  });
}

at::Tensor broadcast(const at::Tensor& tensor, const Communicator& world, int root) {
  const auto operand = ordinary(tensor, "nn::broadcast");
  const auto result = operand.detach().clone(at::MemoryFormat::Contiguous);
  world.broadcast(result, root, {.unit = with_shape("nn::broadcast", operand)}).wait();
  return with_gradient(operand, result, [world, root](const at::Tensor& gradient) {
    const auto sum = all_reduce(gradient, world);
    // On ranks other than root, too, the zeros come from an operator on `sum`, because all ranks must take part if this gradient is
    // differentiated again.
    return at::where(at::scalar_tensor(world.rank() == root, sum.options().dtype(at::kBool)), sum, at::zeros({}, sum.options()));
  });
}

}  // namespace tessera::nn
