// The corpus of idioms: what programs do with models, run once with plain libtorch and once sharded. Each idiom ends in the same numbers or
// in an error that says why not. docs/idioms.md is made from it.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/fully_shard.h"

namespace tessera::idioms {

enum class By { Tessera, Torch };

/// How one run of an idiom goes about it.
struct Setting {
  int ranks = 2;
  By optimizer = By::Tessera;
  std::optional<Residence> sharded = {};  // none: the plain run
};

/// An optimizer of either kind.
class Steps {
 public:
  explicit Steps(std::unique_ptr<optim::Optimizer> ours) : ours_(std::move(ours)) {}
  explicit Steps(std::unique_ptr<torch::optim::Optimizer> theirs) : theirs_(std::move(theirs)) {}

  void step() const;
  void zero_grad() const;
  torch::optim::Optimizer* theirs() const { return theirs_.get(); }
  optim::Optimizer* ours() const { return ours_.get(); }

 private:
  std::shared_ptr<optim::Optimizer> ours_;
  std::shared_ptr<torch::optim::Optimizer> theirs_;
};

/// What an idiom has at hand: one rank of one run. The plain run is replicated training: gradients are averaged over the ranks.
class Run {
 public:
  Run(Communicator world, const Setting& setting) : world_(std::move(world)), setting_(setting) {}

  const Communicator& world() const { return world_; }
  int rank() const { return world_.rank(); }
  int ranks() const { return world_.size(); }
  bool sharded() const { return setting_.sharded.has_value(); }
  const Setting& setting() const { return setting_; }

  /// Makes the model a unit. In the plain run, has its gradients averaged.
  void shard(torch::nn::Module& model, ShardOptions options);
  void shard(torch::nn::Module& model) { shard(model, {.mesh = world_}); }
  /// Every child with parameters a unit, and the rest of the model.
  void shard_nested(torch::nn::Module& model, const ShardOptions& options);
  void shard_nested(torch::nn::Module& model) { shard_nested(model, {.mesh = world_}); }
  template <class Holder>
  requires requires(Holder holder) { *holder; }
  void shard(Holder& model, const ShardOptions& options) {
    shard(static_cast<torch::nn::Module&>(*model), options);
  }
  template <class Holder>
  requires requires(Holder holder) { *holder; }
  void shard(Holder& model) {
    shard(static_cast<torch::nn::Module&>(*model));
  }
  template <class Holder>
  requires requires(Holder holder) { *holder; }
  void shard_nested(Holder& model, const ShardOptions& options) {
    shard_nested(static_cast<torch::nn::Module&>(*model), options);
  }
  template <class Holder>
  requires requires(Holder holder) { *holder; }
  void shard_nested(Holder& model) {
    shard_nested(static_cast<torch::nn::Module&>(*model));
  }

  /// loss.backward(), and the mean over the ranks of what it added to the gradients.
  void backward(const at::Tensor& loss) const;
  /// The same for whatever calls backward itself.
  void backward(const std::function<void()>& pass) const;

  /// Over what parameters() lists, or over some tensors.
  Steps sgd(const torch::nn::Module& model, double lr = 0.1, double momentum = 0.5) const;
  Steps sgd(const std::vector<at::Tensor>& parameters, double lr = 0.1, double momentum = 0.5) const;
  Steps adamw(const torch::nn::Module& model, double lr = 0.05, double weight_decay = 0.1) const;
  Steps adamw(const std::vector<at::Tensor>& parameters, double lr = 0.05, double weight_decay = 0.1) const;
  /// tessera::parameters() of a sharded model; of a plain one its own, each once.
  std::vector<at::Tensor> parameters(const torch::nn::Module& model) const;

  /// What is compared.
  void record(const at::Tensor& value);
  void record(double value) { record(torch::tensor(value, torch::kDouble)); }
  /// All whole parameters of the model, in their order.
  void record_parameters(const torch::nn::Module& model);
  /// The whole gradients of these parameters (see parameters()); that there is none counts, too.
  void record_gradients(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& records() const { return records_; }

  /// Values by a formula: with the rank in it, so that every rank has its own batch.
  at::Tensor batch(at::IntArrayRef sizes, int number = 0) const;

  /// The usual loop: so many steps, each with its own batch, recording losses and at the end the parameters.
  void train(const torch::nn::Module& model, const std::function<at::Tensor(int step)>& loss, const Steps& optimizer, int steps = 4);

 private:
  Communicator world_;
  Setting setting_;
  std::vector<torch::nn::Module*> models_;  // whose gradients the plain run averages
  std::vector<at::Tensor> records_;
};

/// Values by a formula, the same on every rank and in every run.
at::Tensor values(at::IntArrayRef sizes, double shift = 0);
/// Gives all parameters values by the formula, so that no generator is needed. Before sharding.
void fill(torch::nn::Module& module);

/// A model for idioms that need no particular one. Neither 2 nor 3 ranks divide the sizes of all its parameters.
struct Mlp : torch::nn::Module {
  torch::nn::Linear first{nullptr}, second{nullptr};
  Mlp() {
    first = register_module("first", torch::nn::Linear(6, 5));
    second = register_module("second", torch::nn::Linear(5, 3));
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
};

struct Idiom {
  std::string what;  // in words, as the page has it
  std::function<void(Run&)> act;
  std::string refused = {};   // if it is: a part of what the error says
  std::string gathered = {};  // and where parameters are gathered, if that is something else
  double within = 0;          // equal to so much, absolute and relative; 0: to the bit
  std::string because = {};   // why not to the bit
  std::string remark = {};    // for the page
};

struct Chapter {
  std::string title;
  std::vector<Idiom> idioms;
};

Chapter construction();
Chapter ties();
Chapter writing();
Chapter freezing();
Chapter hooks();
Chapter gradients();
Chapter autograd();
Chapter passes();
Chapter precision();
Chapter optimizers();
Chapter local_values();
Chapter states();
Chapter ranks();
Chapter places();

std::vector<Chapter> corpus();

}  // namespace tessera::idioms
