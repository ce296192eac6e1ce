// The corpus of idioms: things that programs do with models. Each idiom runs once with plain libtorch and once sharded, and either gives
// the same numbers or is refused with an error that says why. docs/tables/idioms.md is generated from it.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
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

/// The settings of one run of an idiom.
struct Setting {
  int ranks = 2;
  By optimizer = By::Tessera;
  std::optional<Residence> sharded = {};  // nothing for the plain run
  double epsilon = 1e-8;                  // of AdamW
};

/// An optimizer, either Tessera's or torch's.
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

/// One rank of one run, or all ranks of one on XLA devices, with what an idiom needs. The plain run is replicated training: gradients are
/// averaged over the ranks.
class Run {
 public:
  Run(Communicator world, const Setting& setting) : world_(std::move(world)), setting_(setting) {}

  const Communicator& world() const { return world_; }
  int rank() const { return world_.rank(); }
  int ranks() const { return world_.size(); }
  bool sharded() const { return setting_.sharded.has_value(); }
  const Setting& setting() const { return setting_; }

  /// Makes the model a unit. In the plain run, backward() will average the model's gradients instead.
  void shard(torch::nn::Module& model, ShardOptions options);
  void shard(torch::nn::Module& model) { shard(model, {.mesh = world_}); }
  /// Makes every child that has parameters a unit, and the rest of the model another.
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

  /// Calls loss.backward(). In the plain run, also averages over the ranks what it has added to the gradients.
  void backward(const at::Tensor& loss) const;
  /// The same for a function that runs the backward pass itself.
  void backward(const std::function<void()>& pass) const;

  /// Makes an optimizer for the parameters of a model (see parameters()), or for some tensors.
  Steps sgd(const torch::nn::Module& model, double lr = 0.1, double momentum = 0.5) const;
  Steps sgd(const std::vector<at::Tensor>& parameters, double lr = 0.1, double momentum = 0.5) const;
  Steps adamw(const torch::nn::Module& model, double lr = 0.05, double weight_decay = 0.1) const;
  Steps adamw(const std::vector<at::Tensor>& parameters, double lr = 0.05, double weight_decay = 0.1) const;
  /// tessera::parameters() in a sharded run; in the plain run the model's own parameters without repetition.
  std::vector<at::Tensor> parameters(const torch::nn::Module& model) const;

  /// Records a value, which must be the same in the plain and the sharded run.
  void record(const at::Tensor& value);
  void record(double value) { record(torch::tensor(value, torch::kDouble)); }
  /// Records all full parameters of the model, in their order.
  void record_parameters(const torch::nn::Module& model);
  /// Records the full gradients of these parameters (see parameters()), including whether there is one.
  void record_gradients(const std::vector<at::Tensor>& parameters);
  const std::vector<at::Tensor>& records() const { return records_; }

  /// A batch of values from a formula that contains the rank, so that every rank has its own batch.
  at::Tensor batch(at::IntArrayRef sizes, int number = 0) const;

  /// Runs the usual training loop. Records the loss of each step, and the parameters at the end.
  void train(const torch::nn::Module& model, const std::function<at::Tensor(int step)>& loss, const Steps& optimizer, int steps = 4);

 private:
  Communicator world_;
  Setting setting_;
  std::vector<torch::nn::Module*> models_;  // models whose gradients the plain run averages
  std::vector<at::Tensor> records_;
};

/// While it exists, operators of this thread compute in bfloat16 where autocast has them do so, on the CPU and on XLA devices; or none does.
class Autocast {
 public:
  explicit Autocast(bool enabled = true) : was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_cache_enabled(false);
    set(enabled);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    set(was_enabled_);
    at::autocast::set_autocast_cache_enabled(!was_enabled_);
  }

 private:
  static void set(bool enabled) {
    for (const auto device : {at::kCPU, at::kPrivateUse1}) {
      at::autocast::set_autocast_dtype(device, at::kBFloat16);
      at::autocast::set_autocast_enabled(device, enabled);
    }
  }
  bool was_enabled_;
};

/// A folder that all ranks know.
class Folder {
 public:
  explicit Folder(const Run& run) : world_(run.world()) {
    path = std::filesystem::temp_directory_path() / ("tessera-idioms-" + std::to_string(::getpid()) + "-" + std::to_string(run.ranks()));
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    if (world_.is_first()) std::filesystem::remove_all(path);
  }

  std::filesystem::path path;

 private:
  const Communicator world_;
};

/// A number that stands for a text.
inline double sum_of(const std::string& text) {
  double sum = 0;
  for (const char c : text) sum = 0.5 * sum + c;
  return sum;
}

/// Values from a formula, the same on every rank and in every run.
at::Tensor values(at::IntArrayRef sizes, double shift = 0);
/// Fills all parameters with values from the formula, so that no random generator is needed. Call it before sharding.
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

/// An Mlp whose layers are units, and an Mlp that is one unit.
std::shared_ptr<Mlp> nested(Run& run, const ShardOptions& options);
std::shared_ptr<Mlp> one_unit(Run& run, const ShardOptions& options);
inline std::shared_ptr<Mlp> nested(Run& run) { return nested(run, {.mesh = run.world()}); }
inline std::shared_ptr<Mlp> one_unit(Run& run) { return one_unit(run, {.mesh = run.world()}); }

/// The loss of this rank's batch, for models of six inputs.
template <class Model>
at::Tensor loss_of(const Run& run, Model& model, int step) {
  return model.forward(run.batch({4, 6}, step)).pow(2).mean();
}

struct Idiom {
  std::string what;  // the description on the page
  std::function<void(Run&)> act;
  std::string refused = {};   // if the idiom is refused: a part of the error message
  std::string gathered = {};  // the same with gathered memory, if the message differs there
  double within = 0;          // the absolute and relative tolerance; 0 means the same bits
  std::string because = {};   // why the bits may differ
  std::string remark = {};    // a remark for the page
  std::string on_xla = {};    // why it ends in other numbers on XLA devices
};

struct Chapter {
  std::string title;
  std::vector<Idiom> idioms;
};

// Each chapter has a file and a namespace of its own.
// clang-format off
namespace construction { Chapter chapter(); }
namespace ties { Chapter chapter(); }
namespace writing { Chapter chapter(); }
namespace freezing { Chapter chapter(); }
namespace hooks { Chapter chapter(); }
namespace gradients { Chapter chapter(); }
namespace autograd { Chapter chapter(); }
namespace segments { Chapter chapter(); }
namespace passes { Chapter chapter(); }
namespace precision { Chapter chapter(); }
namespace numbers { Chapter chapter(); }
namespace optimizers { Chapter chapter(); }
namespace local_values { Chapter chapter(); }
namespace states { Chapter chapter(); }
namespace ranks { Chapter chapter(); }
namespace places { Chapter chapter(); }
namespace parts { Chapter chapter(); }
namespace collectives { Chapter chapter(); }
namespace adapters { Chapter chapter(); }
namespace quantised { Chapter chapter(); }
namespace layers { Chapter chapter(); }
// clang-format on

std::vector<Chapter> corpus();

}  // namespace tessera::idioms
