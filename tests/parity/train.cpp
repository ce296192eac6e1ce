#include "train.h"

#include <functional>
#include <memory>

#include "models.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/strategy.h"
#include "tessera/shard/unsharding.h"

namespace tessera::parity {
namespace {

constexpr int kSteps = 3;
using Names = std::vector<std::string>;

double clip_p(const Case& test) {
  return test.has("clip_norm") ? std::stod(test.settings["clip_norm"]["p"].get<std::string>()) : 2;
}

double mean(const Communicator& world, const at::Tensor& loss) {
  const auto value = loss.detach().to(at::kFloat).clone();
  world.all_reduce(value, {.op = Reduce::Mean}).wait();
  return value.item<double>();
}

/// Which numbers a pass of this rank takes.
int64_t shift_of(const Case& test, int step, int number, int rank) {
  const bool branches = test.model == "branches";
  return 100 * step + 10 * number + (branches && !test.has("unused") ? 0 : rank) + (branches ? step % 2 : 0);
}

/// The parameters whose gradients the program averages itself.
void average_ignored(const Communicator& world, const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) world.all_reduce(parameter.grad(), {.op = Reduce::Mean}).wait();
}

std::vector<at::Tensor> trained_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) result.push_back(parameter);
  }
  return result;
}

void freeze(Model& model, const Case& test) {
  for (auto& parameter : parameters_of(model, test.get("frozen", Names{}))) parameter.set_requires_grad(false);
}

// --- With Tessera ---

ShardOptions options_of(const Communicator& world, const Case& test, Model& model) {
  ShardOptions options{.mesh = test.mesh.shard == world.size() ? Mesh(world) : Mesh(world, test.mesh)};
  if (test.has("strategy")) options = sharding_strategy(world, test.get("strategy", std::string()));
  options.residence = Residence::Gathered;  // so that every byte is sent
  options.mixed_precision = {
      .param_dtype = test.dtype("param_dtype"), .reduce_dtype = test.dtype("reduce_dtype"), .buffer_dtype = test.dtype("buffer_dtype")};
  if (test.has("reshard_after_forward")) {
    const auto& rule = test.settings["reshard_after_forward"];
    options.reshard_after_forward = rule.is_boolean() ? ReshardAfterForward(rule.get<bool>()) : ReshardAfterForward(rule.get<int>());
  }
  const auto layout = test.get("layout", std::string("flat"));
  options.layout = layout == "rows" ? Layout::Rows : layout == "whole" ? Layout::WholeParameters : Layout::Flat;
  if (const auto dim = test.get<int64_t>("shard_dim", 0)) {
    options.shard_dim = [dim](const std::string&, const at::Tensor& parameter) {
      return parameter.dim() > dim ? std::optional(dim) : std::nullopt;
    };
  }
  options.ignored = parameters_of(model, test.get("ignored", Names{}));
  options.replicated = parameters_of(model, test.get("replicated", Names{}));
  const auto prefetch = test.get("prefetch", std::string("pre"));
  if (prefetch == "post") options.backward_prefetch = BackwardPrefetch::Post;
  if (prefetch == "none") {
    options.backward_prefetch = BackwardPrefetch::None;
    options.forward_prefetch = false;
  }
  if (test.has("unused")) options.unused_parameters = UnusedParameters::Zeros;
  return options;
}

/// The options for a unit: only those parameters that it has may be treated apart.
ShardOptions within(ShardOptions options, const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  for (auto* list : {&options.ignored, &options.replicated}) {
    std::erase_if(*list, [&](const at::Tensor& tensor) {
      return std::ranges::none_of(modules, [&](const auto& module) {
        return std::ranges::any_of(module->parameters(), [&](const auto& own) { return own.is_same(tensor); });
      });
    });
  }
  return options;
}

void shard(Model& model, const Case& test, const ShardOptions& options) {
  auto rest = options;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (const auto& unit : test.units) {
    std::vector<std::shared_ptr<torch::nn::Module>> members;
    for (const auto& name : unit) members.push_back(module_of(model, name));
    const auto own = within(options, members);
    fully_shard(members, own);
    std::erase_if(rest.replicated, [&](const at::Tensor& one) { return std::ranges::any_of(own.replicated, [&](const auto& other) { return one.is_same(other); }); });
    modules.push_back(members.front());
  }
  rest.mixed_precision.output_dtype = test.dtype("output_dtype");
  fully_shard(model, rest);

  if (test.get("prefetch", std::string()) == "lists") {
    for (size_t i = 1; i < modules.size(); i++) {
      set_modules_to_forward_prefetch(*modules[i - 1], std::span(&modules[i], 1));
      set_modules_to_backward_prefetch(*modules[i], std::span(&modules[i - 1], 1));
    }
  }
  if (test.has("divide")) set_gradient_divide_factors(model, {.pre = test.settings["divide"][0], .post = test.settings["divide"][1]});
}

std::unique_ptr<optim::Optimizer> optimizer_of(const Case& test, const std::vector<at::Tensor>& trained) {
  if (test.get("optimizer", std::string()) == "adamw") {
    return std::make_unique<optim::AdamW>(trained, optim::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
  }
  return std::make_unique<optim::SGD>(trained, optim::SgdOptions{.lr = 0.1, .momentum = 0.5});
}

/// The passes of a step. Returns the last one's loss.
at::Tensor forward_and_backward(const Communicator& world, const Case& test, const std::shared_ptr<Model>& model, int step,
                                const optim::GradScaler* scaler) {
  const auto accumulate = test.get("accumulate", std::string());
  const int passes = test.get("passes", 1);
  at::Tensor loss;
  for (int number = 0; number < passes; number++) {
    const bool last = number == passes - 1;
    if (accumulate == "requires_gradient_sync") set_requires_gradient_sync(*model, last);
    if (accumulate == "requires_all_reduce") set_requires_all_reduce(*model, last);
    std::optional<NoSync> unsynced;
    if (accumulate == "no_sync" && !last) unsynced.emplace(no_sync(*model));
    const auto shift = shift_of(test, step, number, world.rank());
    if (test.has("output_dtype")) {
      loss = model->loss(call(model, model->input(shift)), shift);
    } else {
      loss = model->loss(model->forward(model->input(shift)).to(at::kFloat), shift);
    }
    (scaler ? scaler->scale(loss) : loss).backward();
  }
  return loss;
}

// --- Replicated ---

/// A model in plain libtorch. If parameters are computed with in another dtype, it has a second model for that.
class Replica {
 public:
  Replica(const Communicator& world, const Case& test)
      : world_(world), test_(test), model_(make_model(test.model)), computing_(test.has("param_dtype") ? make_model(test.model) : model_) {
    freeze(*model_, test);
    freeze(*computing_, test);
    for (const auto& parameter : parameters_of(*model_, test.get("ignored", Names{}))) ignored_.push_back(parameter);
    if (const auto dtype = test.dtype("param_dtype")) {
      for (auto& parameter : distinct_parameters(*computing_)) parameter.set_data(parameter.detach().to(*dtype));
    }
    if (const auto dtype = test.dtype("buffer_dtype")) {
      for (auto& buffer : computing_->buffers()) {
        if (buffer.is_floating_point()) buffer.set_data(buffer.detach().to(*dtype));
      }
    }
  }

  std::vector<at::Tensor> trained() const { return trained_of(distinct_parameters(*model_)); }

  at::Tensor forward_and_backward(int step, const optim::GradScaler* scaler) {
    const int passes = test_.get("passes", 1);
    const bool each = !test_.has("accumulate");
    at::Tensor loss;
    for (int number = 0; number < passes; number++) {
      const auto shift = shift_of(test_, step, number, world_.rank());
      unshard();
      auto input = computing_->input(shift);
      if (input.is_floating_point()) input = input.to(test_.dtype("param_dtype").value_or(at::kFloat));
      loss = computing_->loss(computing_->forward(input).to(at::kFloat), shift);
      (scaler ? scaler->scale(loss) : loss).backward();
      add_gradients(each || number == passes - 1);
    }
    return loss;
  }

  std::map<std::string, at::Tensor> state() const {
    std::map<std::string, at::Tensor> result;
    for (const auto& parameter : model_->named_parameters()) result[parameter.key()] = parameter.value().detach();
    for (const auto& buffer : computing_->named_buffers()) {
      auto value = buffer.value().to(at::kFloat);
      world_.broadcast(value).wait();
      result[buffer.key()] = value;
    }
    return result;
  }

 private:
  void unshard() {
    const torch::NoGradGuard no_grad;
    if (computing_ == model_) return;
    const auto from = distinct_parameters(*model_), to = distinct_parameters(*computing_);
    for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i]);
  }

  /// Takes the pass's gradients into the sums of this rank, and if they are to be reduced, these into the gradients of the model.
  void add_gradients(bool reduces) {
    const torch::NoGradGuard no_grad;
    const auto parameters = distinct_parameters(*model_), computed = distinct_parameters(*computing_);
    sums_.resize(parameters.size());
    totals_.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); i++) {
      if (!parameters[i].requires_grad()) continue;
      auto& pass = computed[i].mutable_grad();
      if (!pass.defined() && test_.has("unused")) pass = at::zeros_like(computed[i]);
      if (!pass.defined()) continue;
      const auto wide = pass.to(at::kFloat);
      sums_[i] = sums_[i].defined() ? sums_[i] + wide : wide.clone();
      pass = at::Tensor();
      if (!reduces) continue;
      const auto reduced = reduce(sums_[i]);
      sums_[i] = at::Tensor();
      totals_[i] = totals_[i].defined() ? totals_[i] + reduced : reduced;
    }
    if (!reduces) return;
    for (size_t i = 0; i < parameters.size(); i++) parameters[i].mutable_grad() = totals_[i];
  }

  at::Tensor reduce(const at::Tensor& sum) const {
    const bool divides = test_.has("divide");
    auto sent = divides ? sum / test_.settings["divide"][0].get<double>() : sum;
    if (const auto dtype = test_.dtype("reduce_dtype")) sent = sent.to(*dtype).to(at::kFloat);
    sent = sent.contiguous().clone();
    world_.all_reduce(sent, {.op = divides ? Reduce::Sum : Reduce::Mean}).wait();
    return divides ? sent / test_.settings["divide"][1].get<double>() : sent;
  }

 public:
  void zero_grad() {
    for (auto& parameter : distinct_parameters(*model_)) parameter.mutable_grad() = at::Tensor();
    totals_.clear();
  }

 private:
  Communicator world_;
  const Case& test_;
  std::shared_ptr<Model> model_, computing_;
  std::vector<at::Tensor> ignored_;
  std::vector<at::Tensor> sums_, totals_;
};

at::Tensor plain_norm(const std::vector<at::Tensor>& parameters, double p) {
  std::vector<at::Tensor> norms;
  for (const auto& parameter : parameters) {
    if (parameter.grad().defined()) norms.push_back(at::linalg_vector_norm(parameter.grad(), p));
  }
  return at::linalg_vector_norm(at::stack(norms), p);
}

}  // namespace

Result train_with_tessera(const Communicator& world, const Case& test) {
  const auto model = make_model(test.model);
  freeze(*model, test);
  const auto options = options_of(world, test, *model);
  shard(*model, test, options);
  const auto trained = trained_of(parameters(*model));
  const auto optimizer = optimizer_of(test, trained);
  const bool in_backward = test.get("in_backward", false);
  if (in_backward) optimizer->step_in_backward();
  std::optional<optim::GradScaler> scaler;
  if (test.has("scale")) scaler.emplace(optim::GradScalerOptions{.init_scale = test.get("scale", 1.0), .growth_interval = 2});

  Result result;
  for (int step = 0; step < kSteps; step++) {
    const auto& groups = {options.mesh.shard(), options.mesh.replicate()};
    for (const auto& group : groups) group.reset_traffic();
    reset_counters(*model);
    const auto loss = forward_and_backward(world, test, model, step, scaler ? &*scaler : nullptr);
    result.received = {};
    for (const auto& group : groups) {
      result.received.gathered += static_cast<int64_t>(group.traffic(Operation::AllGather).bytes);
      result.received.reduced += static_cast<int64_t>(group.traffic(Operation::ReduceScatter).bytes);
      result.received.all_reduced += static_cast<int64_t>(group.traffic(Operation::AllReduce).bytes);
    }
    if (!in_backward) {
      average_ignored(world, options.ignored);
      if (scaler) scaler->unscale_(*optimizer);
      // With a scaler, the optimizer divides in its step, and knows the norm of what comes out.
      const auto norm = scaler ? optimizer->clip_grad_norm(1e9) : grad_norm(trained, {.p = clip_p(test)});
      result.norms.push_back(norm.item<double>());
      if (test.has("clip_norm")) {
        const auto clipped = clip_grad_norm(trained, test.settings["clip_norm"]["max"], {.p = clip_p(test)});
        TORCH_CHECK(at::allclose(clipped, norm), "clip_grad_norm returns the norm");
      }
      if (test.has("clip_value")) torch::nn::utils::clip_grad_value_(trained, test.get("clip_value", 0.0));
    }
    if (scaler) {
      scaler->step(*optimizer);
      scaler->update();
    } else {
      optimizer->step();
    }
    optimizer->zero_grad();
    result.losses.push_back(mean(world, loss));
  }
  result.state = full_state(*model);
  return result;
}

Result train_replicated(const Communicator& world, const Case& test) {
  Replica replica(world, test);
  const auto trained = replica.trained();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (test.get("optimizer", std::string()) == "adamw") {
    optimizer = std::make_unique<torch::optim::AdamW>(trained, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(trained, torch::optim::SGDOptions(0.1).momentum(0.5));
  }
  std::optional<optim::GradScaler> scaler;
  if (test.has("scale")) scaler.emplace(optim::GradScalerOptions{.init_scale = test.get("scale", 1.0), .growth_interval = 2});

  Result result;
  for (int step = 0; step < kSteps; step++) {
    const auto loss = replica.forward_and_backward(step, scaler ? &*scaler : nullptr);
    if (scaler) scaler->unscale_(*optimizer);
    const torch::NoGradGuard no_grad;
    const auto norm = plain_norm(trained, clip_p(test));
    if (!test.get("in_backward", false)) result.norms.push_back(norm.item<double>());
    if (test.has("clip_norm")) {
      const auto factor = at::clamp(test.settings["clip_norm"]["max"].get<double>() / (norm + 1e-6), 0, 1);
      for (const auto& parameter : trained) parameter.mutable_grad() = parameter.grad() * factor;
    }
    if (test.has("clip_value")) {
      const auto bound = test.get("clip_value", 0.0);
      for (const auto& parameter : trained) parameter.mutable_grad() = parameter.grad().clamp(-bound, bound);
    }
    if (scaler) {
      scaler->step(*optimizer);
      scaler->update();
    } else {
      optimizer->step();
    }
    replica.zero_grad();
    result.losses.push_back(mean(world, loss));
  }
  result.state = replica.state();
  return result;
}

}  // namespace tessera::parity
