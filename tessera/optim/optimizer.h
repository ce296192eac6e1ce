// What all optimizers over shards share. The shards of a unit lie one after the other, so a step updates each unit as one flat tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {
class Unit;
}

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
  /// What one call of a kernel updates: lists in the same order.
  struct Update {
    std::vector<at::Tensor> parameters, gradients;
    std::map<std::string, std::vector<at::Tensor>> state;
  };

  /// `state_names`: the tensors to keep for each parameter, zeros at first.
  Optimizer(std::vector<ParameterGroup> groups, Settings settings, std::vector<std::string> state_names);

  /// Takes step number `step`, counted from 1, of all that is in the update.
  virtual void apply(const Settings& settings, int64_t step, Update& update) = 0;

 private:
  struct Member {
    at::Tensor parameter;
    int64_t offset = 0;  // in the run
    int64_t steps = 0;
  };
  /// Parameters next to each other in one unit, or a single one.
  struct Run {
    std::vector<Member> members;
    std::weak_ptr<Unit> unit;  // none for whole parameters
    at::Tensor flat;           // over all of them; a single one as it is
    std::map<std::string, at::Tensor> state = {};
  };
  struct Group {
    Settings settings;
    double ratio;  // of its rate to the first group's
    std::vector<Run> runs;
  };

  static std::vector<Run> runs_of(std::vector<at::Tensor> parameters);
  static at::Tensor part(const Run& run, const at::Tensor& flat, const Member& member);
  static at::Tensor flat_gradient(const Run& run);
  void make_state(Run& run);
  void collect(Run& run, std::map<int64_t, Update>& updates);
  static bool has_gradient(const Run& run);
  std::vector<std::shared_ptr<Unit>> units_to_update() const;
  Member* find(const at::Tensor& parameter, Run*& run);

  std::vector<Group> groups_;
  const std::vector<std::string> state_names_;
  std::vector<Communicator> worlds_;  // of the sharded parameters; nearly always one
};

}  // namespace tessera::optim
