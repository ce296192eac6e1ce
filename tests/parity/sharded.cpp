// A model that Tessera shards as a case says.
#include <torch/torch.h>

#include "models.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/call.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_sharded.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tessera/shard/strategy.h"
#include "tessera/shard/unsharding.h"
#include "tessera/shard/wrap.h"
#include "train.h"

namespace tessera::parity {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

bool contains(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(tensors, [&](const at::Tensor& other) { return other.is_same(tensor); });
}

ShardOptions options_of(const Communicator& world, const Case& test, Model& model) {
  ShardOptions options{.mesh = test.mesh.shard == world.size() ? Mesh(world) : Mesh(world, test.mesh)};
  if (test.has("strategy")) options = sharding_strategy(world, test.get("strategy", std::string()));
  const bool shared = test.get("residence", std::string()) == "node-shared";
  options.residence = shared ? Residence::NodeShared : Residence::Gathered;
  if (test.get("listing", std::string()) == "flat") options.listing = Listing::Flat;
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
  options.ignored = parameters_of(model, test.names("ignored"));
  options.replicated = parameters_of(model, test.names("replicated"));
  options.shard_size_multiple = test.get<int64_t>("shard_size_multiple", 1);
  const auto prefetch = test.get("prefetch", std::string("pre"));
  if (prefetch == "post") options.schedule.backward_prefetch = BackwardPrefetch::Post;
  if (prefetch == "none") {
    options.schedule.backward_prefetch = BackwardPrefetch::None;
    options.schedule.forward_prefetch = false;
  }
  if (test.get("start", std::string()) == "from_rank0") options.start = Start::FromRank0;
  if (test.has("offload")) options.offload = {.parameters = OffloadTo::Disk, .gradients = OffloadTo::Disk, .disk = disk_for_tests()};
  if (test.has("unused")) options.schedule.unused_parameters = UnusedParameters::Zeros;
  return options;
}

/// The options for a unit of these modules. Of the parameters that are treated apart, it gets those that it has.
ShardOptions options_for(const Modules& modules, ShardOptions options) {
  std::vector<at::Tensor> own;
  for (const auto& module : modules) {
    const auto more = module->parameters();
    own.insert(own.end(), more.begin(), more.end());
  }
  for (auto* list : {&options.ignored, &options.replicated})
    std::erase_if(*list, [&](const auto& tensor) { return !contains(own, tensor); });
  return options;
}

void shard(Model& model, const Case& test, ShardOptions options) {
  if (test.has("policy")) return fully_shard(model, options, wrap_classes({test.get("policy", std::string())}));
  Modules firsts;
  for (const auto& unit : test.units) {
    Modules modules;
    for (const auto& name : unit) modules.push_back(module_of(model, name));
    const auto own = options_for(modules, options);
    fully_shard(modules, own);
    std::erase_if(options.replicated, [&](const auto& tensor) { return contains(own.replicated, tensor); });
    firsts.push_back(modules.front());
  }
  options.mixed_precision.output_dtype = test.dtype("output_dtype");
  fully_shard(model, options);

  if (test.get("prefetch", std::string()) == "lists") {
    for (size_t i = 1; i < firsts.size(); i++) {
      set_modules_to_forward_prefetch(*firsts[i - 1], std::span(&firsts[i], 1));
      set_modules_to_backward_prefetch(*firsts[i], std::span(&firsts[i - 1], 1));
    }
  }
  if (test.has("divide")) set_gradient_divide_factors(model, {.pre = test.settings["divide"][0], .post = test.settings["divide"][1]});
}

/// With or without values.
std::shared_ptr<Model> made(const Communicator& world, const Case& test) {
  const auto start = test.get("start", std::string());
  const auto make = [&] { return make_model(test.model); };
  return start == "deferred" || (start == "from_rank0" && !world.is_first()) ? deferred_init(make) : make();
}

class Sharded final : public Trainee {
 public:
  Sharded(const Communicator& world, const Case& test) : Trainee(world, test), model_(made(world, test)) {
    for (auto& parameter : parameters_of(*model_, test.names("frozen"))) parameter.set_requires_grad(false);
    const auto options = options_of(world, test, *model_);
    ignored_ = options.ignored;
    groups_ = {options.mesh->shard(), options.mesh->replicate()};
    if (!test.has("class")) {
      shard(*model_, test, options);
      return;
    }
    class_.emplace(model_, world,
                   FullyShardedOptions{.shard_size_multiple = options.shard_size_multiple,
                                       .auto_wrap_policy = wrap_classes({test.get("class", std::string())}),
                                       .compute_dtype = test.dtype("param_dtype")});
    groups_ = {class_->world()};
  }

  std::vector<at::Tensor> trained() const override {
    auto result = parameters(*model_);
    std::erase_if(result, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
    return result;
  }
  bool is_sharded() const override { return true; }

  at::Tensor loss(int64_t shift) override {
    if (class_) return model_->loss((*class_)(model_->input(shift)).to(at::kFloat), shift);
    if (test_.has("checkpoint")) {
      activation::Options options;
      if (test_.has("offload")) options = {.offload = OffloadTo::Disk, .disk = disk_for_tests()};
      const auto output =
          activation::checkpoint(options, [model = model_](const at::Tensor& x) { return model->forward(x); }, model_->input(shift));
      return model_->loss(output.to(at::kFloat), shift);
    }
    if (test_.has("output_dtype")) return model_->loss(call(model_, model_->input(shift)), shift);
    return model_->loss(model_->forward(model_->input(shift)).to(at::kFloat), shift);
  }
  void backward(const at::Tensor& loss, bool last) override {
    const auto accumulate = test_.get("accumulate", std::string());
    if (accumulate == "requires_gradient_sync") set_requires_gradient_sync(*model_, last ? Required::Yes : Required::No);
    if (test_.has("reshard_after_backward")) set_reshard_after_backward(*model_, last ? ReshardAfterBackward::Yes : ReshardAfterBackward::No);
    if (accumulate == "requires_all_reduce") set_requires_all_reduce(*model_, last ? Required::Yes : Required::No);
    std::optional<NoSync> unsynced;
    if (accumulate == "no_sync" && !last) unsynced.emplace(no_sync(*model_));
    loss.backward();
  }
  void finish_gradients() override {
    for (const auto& parameter : ignored_) world_.all_reduce(parameter.grad(), {.op = Reduce::Mean}).wait();
  }
  at::Tensor norm(double p) const override { return grad_norm(trained(), {.p = p}); }
  void clip_norm(double max, double p) const override { clip_grad_norm(trained(), max, {.p = p}); }

  std::map<std::string, at::Tensor> state(const checkpoint::OptimizerRef& optimizer) const override {
    auto result = checkpoint::full_state_dict(*model_);
    for (const auto& [parameter, state] : checkpoint::full_optim_state_dict(optimizer, *model_)) {
      for (const auto& [key, tensor] : state) result["optimizer." + parameter + "." + key] = tensor;
    }
    return result;
  }
  void reset_received() override {
    reset_counters(*model_);
    for (const auto& group : groups_) group.reset_traffic();
  }
  Bytes received() const override {
    // Gathers are not taken from the traffic, because a unit may be resharded to a group that is none of these.
    Bytes result{.gathered = static_cast<int64_t>(counters(*model_).gathered_bytes)};
    for (const auto& group : groups_) {
      result.reduced += static_cast<int64_t>(group.traffic(Operation::ReduceScatter).bytes);
      result.all_reduced += static_cast<int64_t>(group.traffic(Operation::AllReduce).bytes);
    }
    return result;
  }

 private:
  std::shared_ptr<Model> model_;
  std::optional<FullyShardedDataParallel<std::shared_ptr<Model>>> class_;  // of cases that call the model through it
  std::vector<at::Tensor> ignored_;                                        // whose gradients the program averages
  std::vector<Communicator> groups_;
};

}  // namespace

Result train_with_tessera(const Communicator& world, const Case& test) {
  Sharded sharded(world, test);
  return train(world, test, sharded);
}

}  // namespace tessera::parity
