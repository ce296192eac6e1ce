#include "tessera/nn/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/base/words.h"
#include "tessera/shard/weight_operator.h"

namespace tessera::nn {
namespace {

namespace ag = torch::autograd;

at::ScalarType statistics_dtype(const at::Tensor& x) {
  return at::promoteTypes(x.scalar_type(), at::kFloat);
}

at::Tensor widened(const at::Tensor& parameter, const at::Tensor& x) {
  return parameter.defined() ? parameter.to(statistics_dtype(x)) : parameter;
}

/// Statistics of each channel over all ranks, in float64.
struct Statistics {
  at::Tensor mean, variance;
  double count = 0;
};

Statistics statistics_of(const at::Tensor& x, const Communicator& world) {
  const auto channels = x.size(1);
  const auto count = static_cast<double>(x.numel() / channels);
  const auto own = at::zeros({2 * channels + 1}, x.options().dtype(at::kDouble));
  own[2 * channels].fill_(count);
  if (count > 0) {
    std::vector<int64_t> others = {0};
    for (int64_t i = 2; i < x.dim(); i++) others.push_back(i);
    const auto [variance, mean] = at::var_mean(x.to(statistics_dtype(x)), others, /*correction=*/0);
    own.narrow(0, 0, channels).copy_(mean);
    own.narrow(0, channels, channels).copy_(variance).mul_(count);
  }
  const auto all = at::empty({world.size(), 2 * channels + 1}, own.options());
  const Piece piece{.whole = all, .own = own};
  world.all_gather(std::span(&piece, 1), {.unit = "statistics of a batch"}).wait();
  const auto means = all.narrow(1, 0, channels), squares = all.narrow(1, channels, channels), counts = all.narrow(1, 2 * channels, 1);
  const auto total = counts.sum().item<double>();
  if (total <= 1) {
    throw UsageError("batch normalization over all ranks needs more than one value per channel in training, and has {}", total);
  }
  const auto mean = (means * counts).sum(0) / total;
  return {.mean = mean, .variance = (squares + counts * (means - mean).square()).sum(0) / total, .count = total};
}

void update(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) at::Tensor(running).copy_(running.to(at::kDouble).lerp(value, momentum));
}

/// One value for each channel, in a shape that broadcasts over x.
at::Tensor beside_channels(const at::Tensor& values, const at::Tensor& x) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[1] = x.size(1);
  return values.view(sizes);
}

/// The result for a batch without values, for which libtorch's kernels divide by zero. Uses the parameters nevertheless: if this rank did
/// not, the other ranks would wait for its use of the unit.
at::Tensor nothing_normalized(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  auto result = at::empty_like(x);
  if (weight.defined()) result.mul_(beside_channels(widened(weight, x), x));
  if (bias.defined()) result.add_(beside_channels(widened(bias, x), x));
  return result;
}

struct World : torch::CustomClassHolder {
  explicit World(Communicator communicator) : communicator(std::move(communicator)) {}
  const Communicator communicator;
};

/// Normalizes with given statistics. The gradient of x includes the path through the statistics, which depend on the values of all ranks.
class Normalize : public ag::Function<Normalize> {
 public:
  static at::Tensor forward(ag::AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& given_weight,
                            const std::optional<at::Tensor>& given_bias, const Statistics& statistics, double eps,
                            const Communicator& world) {
    const auto weight = given_weight.value_or(at::Tensor()), bias = given_bias.value_or(at::Tensor());
    const auto mean = statistics.mean.to(statistics_dtype(x)), variance = statistics.variance.to(statistics_dtype(x));
    context->save_for_backward({x, weight, mean, variance});
    context->saved_data["count"] = statistics.count;
    context->saved_data["eps"] = eps;
    context->saved_data["world"] = c10::IValue::make_capsule(c10::make_intrusive<World>(world));
    if (x.numel() == 0) return nothing_normalized(x, weight, bias);
    return std::get<0>(
        at::native_batch_norm(x, widened(weight, x), widened(bias, x), mean, variance, /*training=*/false, /*momentum=*/0, eps));
  }

  static ag::variable_list backward(ag::AutogradContext* context, const ag::variable_list& gradients) {
    if (c10::GradMode::is_enabled()) {
      throw UsageError("second derivatives of batch normalization over all ranks are not available; call backward without create_graph");
    }
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &mean = saved[2], &variance = saved[3];
    const auto weight = saved[1].defined() ? widened(saved[1], x) : at::ones_like(mean);
    const auto eps = context->saved_data["eps"].toDouble(), count = context->saved_data["count"].toDouble();
    // A rank without a gradient takes part with zeros, because the other ranks wait for it.
    // Uses the memory format of x, because libtorch's kernel is wrong for a single image whose gradient has another format (channels last).
    const auto gradient = gradients[0].defined() ? gradients[0].contiguous(x.suggest_memory_format()) : at::zeros_like(x);
    auto [of_x, of_weight, of_bias] =
        x.numel() == 0
            ? std::make_tuple(at::zeros_like(x), at::zeros_like(mean), at::zeros_like(mean))
            : at::native_batch_norm_backward(gradient, x, weight, mean, variance, {}, {}, /*train=*/false, eps, {true, true, true});
    if (context->needs_input_grad(0)) {
      const auto world = c10::static_intrusive_pointer_cast<World>(context->saved_data["world"].toCapsule());
      const auto sums = at::stack({of_weight, of_bias}).to(at::kDouble);
      world->communicator.all_reduce(sums, {}, {.unit = "gradients of batch statistics"}).wait();
      // For each channel, the gradient through the mean and the variance is a linear function of x.
      const auto rate = (variance.to(at::kDouble) + eps).rsqrt();
      const auto scale = rate * weight;
      const auto slope = -scale * rate * sums[0] / count;
      const auto offset = -scale * sums[1] / count - slope * mean;
      const auto line = [&](const at::Tensor& values) { return beside_channels(values.to(statistics_dtype(x)), x); };
      of_x = at::addcmul(of_x + line(offset), x, line(slope)).to(x.scalar_type());
    }
    if (!saved[1].defined()) return {of_x, {}, {}, {}, {}, {}};
    return {of_x, of_weight, of_bias, {}, {}, {}};
  }
};

/// batch_norm with the statistics of the batches of all ranks. Parameters and running statistics that the module lacks are undefined.
at::Tensor normalized(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& running_mean,
                      const at::Tensor& running_var, double momentum, double eps, const Communicator& world) {
  Statistics statistics;
  {
    const c10::AutoGradMode no_grad(false);
    statistics = statistics_of(input, world);
    update(running_mean, statistics.mean, momentum);
    update(running_var, statistics.variance * (statistics.count / (statistics.count - 1)), momentum);
  }
  // torch::autograd::Function takes no undefined tensor as an operand.
  const auto given = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return Normalize::apply(input, given(weight), given(bias), statistics, eps, world);
}

/// The weight of a batch norm, which may be undefined; nothing for other modules.
template <class... Modules>
std::optional<at::Tensor> weight_of(const torch::nn::Module& module) {
  std::optional<at::Tensor> weight;
  const auto look = [&](const auto* norm) {
    if (norm != nullptr) weight = norm->weight;
  };
  (look(dynamic_cast<const Modules*>(&module)), ...);
  return weight;
}

}  // namespace

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (!is_training() && options.track_running_stats()) return BatchNormImplBase::forward(input);
  _check_input_dim(input);
  auto momentum = options.momentum().value_or(0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) momentum = 1 / num_batches_tracked.item<double>();
  }
  return normalized(input, weight, bias, running_mean, running_var, momentum, options.eps(), world_);
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (!input.defined()) throw UsageError("SyncBatchNorm was given an undefined tensor");
  if (input.dim() >= 2 && input.size(1) == options.num_features()) return;
  throw UsageError("SyncBatchNorm of {} channels takes tensors with as many channels in dimension 1, but was given sizes [{}]",
                   options.num_features(), joined(input.sizes()));
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::SyncBatchNorm(" << options.num_features() << ")";
}

void convert_sync_batchnorm(ModuleRef module, const Communicator& world) {
  std::vector<at::Tensor> weights;
  std::vector<std::string> unknown;
  const auto look_at = [&](const torch::nn::Module& each, const std::string& name) {
    const auto weight = weight_of<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(each);
    if (!weight) return;
    if (weight->defined() && weight->key_set().has(kPagingKey)) {
      weights.push_back(*weight);
    } else {
      unknown.push_back(name);
    }
  };
  look_at(module, module->name());
  for (const auto& child : module->named_modules({}, /*include_self=*/false)) look_at(*child.value(), child.key());
  if (!unknown.empty()) {
    throw UsageError(
        "convert_sync_batchnorm: a batch norm is recognized by its sharded weight, which is missing in {}; call it after fully_shard, "
        "and declare batch norms that are affine(false), ignored or not sharded as tessera::nn::SyncBatchNorm",
        some_of(unknown));
  }
  for (const auto& weight : weights) {
    replace_weight_operator(weight, [world](std::string_view name, std::span<const c10::IValue> arguments) -> std::optional<at::Tensor> {
      const bool is_training = name == "aten::batch_norm" && arguments[5].toBool();
      if (!is_training) return std::nullopt;
      const auto tensor = [&](size_t place) { return arguments[place].isTensor() ? arguments[place].toTensor() : at::Tensor(); };
      return normalized(tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), arguments[6].toDouble(), arguments[7].toDouble(), world);
    });
  }
}

}  // namespace tessera::nn
