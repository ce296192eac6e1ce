// What all optimizers over shards share. The shards of a unit lie one after the other, so a step updates each unit as one flat tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {
class Unit;
class WriteGuard;
}  // namespace tessera

namespace tessera::optim {

/// Parameters that share their settings. Unset values are those of the optimizer. Groups may cut through units.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
};

/// What an optimizer keeps for one parameter: tensors like its shard, and how many "steps" it took.
using ParameterState = std::map<std::string, at::Tensor>;

class Optimizer {
 public:
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer() = default;

  /// Updates every parameter that has a gradient.
  void step();
  /// Says that this rank leaves out a step that others take. Its parameters stay as they are.
  void skip_step();
  /// The next step sees gradients times this factor (a scalar; several multiply): costs no pass over memory of its own. Forgotten by
  /// zero_grad() and skip_step().
  void scale_gradients(const at::Tensor& factor);
  /// As tessera::clip_grad_norm over all parameters, but the next step does the scaling. Gives the norm before it.
  at::Tensor clip_grad_norm(double max_norm, double p = 2);
  void zero_grad();

  /// The rate of the first group; setting one keeps the ratios that the groups had to it at first, also through 0. Throws UsageError where
  /// there are none: the first group began with 0 and another did not.
  double lr() const { return groups_.front().settings.lr; }
  void set_lr(double lr);

  /// The state of every parameter that has taken a step, under its name in the model. The tensors are the optimizer's own, not copies.
  std::map<std::string, ParameterState> state(const torch::nn::Module& model) const;
  /// Copies such a state in; parameters that it does not name start anew. Throws UsageError, and changes nothing, if it does not fit.
  void load_state(const torch::nn::Module& model, const std::map<std::string, ParameterState>& state);

 protected:
  struct Settings {
    double lr;
    double weight_decay;
  };
  struct Member {
    at::Tensor parameter;
    int64_t offset = 0;  // in the run
    int64_t steps = 0;
  };
  /// A tensor to keep for each parameter, zeros at first: like the parameter unless it has a dtype of its own, and then with one value for
  /// each `block` of the parameter's.
  struct StateKind {
    std::string name;
    std::optional<at::ScalarType> dtype = {};
    int64_t block = 1;
  };
  /// What is updated at once: parameters next to each other in one unit, or a single one.
  struct Item {
    at::Tensor parameter, gradient;
    std::span<const at::Tensor> state;  // in the order of the kinds
    at::Tensor cast_copy;                  // the parameter as other ranks read it, in bfloat16; undefined where nobody does
    std::span<const Member> members;
    at::Tensor factor;  // of the gradient; undefined for 1
  };

  Optimizer(std::vector<ParameterGroup> groups, Settings settings, std::vector<StateKind> state_kinds);

  /// Takes step number `step`, counted from 1, of parameters that have taken as many.
  virtual void apply(const Settings& settings, int64_t step, const Item& item) = 0;
  /// Before the first and after the last item of a step: for rules that need to know of all before they can end one.
  virtual void begin_step() {}
  virtual void end_step() {}

 private:
  struct Run {
    std::vector<Member> members;
    std::weak_ptr<Unit> unit;  // none for whole parameters
    at::Tensor flat;           // over all members; a single one as it is
    std::vector<at::Tensor> state = {};
  };
  struct Releases;
  struct Group {
    Settings settings;
    double ratio;  // of its rate to the first group's
    std::vector<Run> runs;
  };

  std::vector<Run> runs_of(std::vector<at::Tensor> parameters) const;
  static at::Tensor part(const Run& run, const at::Tensor& flat, const Member& member);
  static at::Tensor flat_gradient(const Run& run);
  void make_state(Run& run) const;
  void step_run(const Settings& settings, Run& run, const WriteGuard& guard);
  std::span<const std::shared_ptr<Unit>> units_with_gradients();
  static bool has_gradient(const Run& run);
  Member* find(const at::Tensor& parameter, Run*& run);

  std::vector<Group> groups_;
  const std::vector<StateKind> state_kinds_;
  at::Tensor factor_;                           // of the next step's gradients
  std::vector<Communicator> worlds_;            // of the sharded parameters; nearly always one
  std::vector<at::Tensor> parameters_;          // of all groups
  std::vector<std::shared_ptr<Unit>> units_;    // of a step: empty between steps, and kept for its memory
};

}  // namespace tessera::optim
