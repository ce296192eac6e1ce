#include "idiom.h"

#include "tessera/base/move_module.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"

namespace tessera::idioms {
namespace {

/// The tensors without repetition; tied parameters are registered more than once.
std::vector<at::Tensor> distinct(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : module.parameters()) {
    if (std::ranges::none_of(result, [&](const auto& known) { return known.is_same(tensor); })) result.push_back(tensor);
  }
  return result;
}

}  // namespace

void Steps::step() const {
  if (ours_) {
    ours_->step();
  } else {
    theirs_->step();
  }
}

void Steps::zero_grad() const {
  if (ours_) {
    ours_->zero_grad();
  } else {
    theirs_->zero_grad();
  }
}

void Run::shard(torch::nn::Module& model, ShardOptions options) {
  if (!sharded()) {
    models_.push_back(&model);
    return;
  }
  if (!world_.traits().device.is_cpu()) move_module(model, world_.traits().device);
  options.mesh = world_;
  options.residence = *setting_.sharded;
  fully_shard(model, options);
}

void Run::shard_nested(torch::nn::Module& model, const ShardOptions& options) {
  for (const auto& child : model.children()) {
    if (sharded() && !child->parameters().empty()) shard(*child, options);
  }
  shard(model, options);
}

void Run::backward(const at::Tensor& loss) const {
  backward([&] { loss.backward(); });
}

void Run::backward(const std::function<void()>& pass) const {
  if (sharded()) return pass();
  struct Grown {
    at::Tensor parameter, before;
  };
  std::vector<Grown> grown;
  for (const auto* model : models_) {
    for (const auto& parameter : distinct(*model)) grown.push_back({.parameter = parameter, .before = parameter.grad()});
  }
  for (const auto& [parameter, before] : grown) parameter.mutable_grad() = at::Tensor();
  pass();
  const torch::NoGradGuard no_grad;
  for (const auto& [parameter, before] : grown) {
    auto& gradient = parameter.mutable_grad();
    if (gradient.defined()) {
      gradient = gradient.is_sparse() ? gradient.to_dense() : gradient.clone(at::MemoryFormat::Contiguous);
      world_.all_reduce(gradient, {.op = Reduce::Mean}).wait();
      if (before.defined()) gradient = before + gradient;
    } else {
      gradient = before;
    }
  }
}

Steps Run::sgd(const torch::nn::Module& model, double lr, double momentum) const {
  return sgd(parameters(model), lr, momentum);
}

Steps Run::sgd(const std::vector<at::Tensor>& parameters, double lr, double momentum) const {
  if (setting_.optimizer == By::Tessera) return Steps(std::make_unique<optim::SGD>(parameters, optim::SgdOptions{.lr = lr, .momentum = momentum}));
  return Steps(std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(lr).momentum(momentum)));
}

Steps Run::adamw(const torch::nn::Module& model, double lr, double weight_decay) const {
  return adamw(parameters(model), lr, weight_decay);
}

Steps Run::adamw(const std::vector<at::Tensor>& parameters, double lr, double weight_decay) const {
  if (setting_.optimizer == By::Tessera) {
    return Steps(std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{.lr = lr, .eps = setting_.epsilon, .weight_decay = weight_decay}));
  }
  return Steps(std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(lr).eps(setting_.epsilon).weight_decay(weight_decay)));
}

std::vector<at::Tensor> Run::parameters(const torch::nn::Module& model) const {
  return sharded() ? tessera::parameters(model) : distinct(model);
}

void Run::record(const at::Tensor& value) {
  const torch::NoGradGuard no_grad;
  records_.push_back(value.detach().clone());
}

void Run::record_parameters(const torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters(model)) {
    record(sharded() && shard_info(parameter) ? full_parameter(parameter) : parameter);
  }
}

void Run::record_gradients(const std::vector<at::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters) {
    const auto whole = sharded() && shard_info(parameter) ? full_grad(parameter) : parameter.grad();
    record(whole.defined() ? whole : torch::full({}, -12345.0));
  }
}

at::Tensor Run::batch(at::IntArrayRef sizes, int number) const {
  std::vector<at::Tensor> of_ranks;
  for (const int each : world_.local_ranks()) of_ranks.push_back(values(sizes, 0.3 * each + 1.7 * number));
  return world_.traits().device.is_cpu() ? of_ranks.front() : world_.from_replicas(of_ranks);
}

void Run::train(const torch::nn::Module& model, const std::function<at::Tensor(int step)>& loss, const Steps& optimizer, int steps) {
  for (int step = 0; step < steps; step++) {
    const auto value = loss(step);
    backward(value);
    optimizer.step();
    optimizer.zero_grad();
    record(value);
  }
  record_parameters(model);
}

at::Tensor values(at::IntArrayRef sizes, double shift) {
  return torch::arange(c10::multiply_integers(sizes), torch::kFloat).mul(0.7).add(shift).sin().view(sizes);
}

void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int shift = 0;
  for (auto& parameter : module.parameters()) {
    if (at::isFloatingType(parameter.scalar_type()) || at::isComplexType(parameter.scalar_type())) {
      parameter.copy_(values(parameter.sizes(), shift++).mul(0.5));
    }
  }
}

std::shared_ptr<Mlp> nested(Run& run, const ShardOptions& options) {
  const auto model = std::make_shared<Mlp>();
  run.shard_nested(model, options);
  return model;
}

std::shared_ptr<Mlp> one_unit(Run& run, const ShardOptions& options) {
  const auto model = std::make_shared<Mlp>();
  run.shard(model, options);
  return model;
}

std::vector<Chapter> corpus() {
  return {construction::chapter(), ties::chapter(),   writing::chapter(),   freezing::chapter(),     hooks::chapter(),
          gradients::chapter(),    autograd::chapter(), segments::chapter(),  passes::chapter(),       precision::chapter(),
          numbers::chapter(),
          optimizers::chapter(),   local_values::chapter(), states::chapter(), ranks::chapter(),        places::chapter(),
          parts::chapter(),        collectives::chapter(), adapters::chapter(),  quantised::chapter(),    layers::chapter()};
}

}  // namespace tessera::idioms
