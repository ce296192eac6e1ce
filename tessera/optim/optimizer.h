// Base class of the optimizers over shards. The shards of a unit are adjacent in memory, so a step updates each unit as one flat tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"
#include "tessera/shard/options.h"

namespace tessera {
class Unit;
class WriteGuard;
enum class WriteKind;
}  // namespace tessera

namespace tessera::optim {

/// Parameters with settings of their own. Unset values are those of the optimizer. Parameters of one unit may be in different groups.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
};

/// The state of one parameter: tensors like its shard, and "step", the number of steps that it has taken.
using ParameterState = std::map<std::string, at::Tensor>;

class Optimizer {
 public:
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;
  virtual ~Optimizer();

  /// Updates every parameter that has a gradient.
  void step();
  /// From the next backward pass on, each unit is updated as soon as all ranks have its gradients: the sum and the update are one pass over
  /// memory, and the shards get no gradients. step() then ends the step, and updates only parameters that are in no unit. There has to be
  /// exactly one backward pass between two calls of step(), and whatever needs gradients (clipping by norm, scaling, hooks on shards) is a
  /// UsageError. Throws UsageError if the rule needs all gradients before it can update a unit, or if there is no shard to update.
  void step_in_backward();
  /// From the next backward pass on, shards get their gradients again, and step() updates them.
  void step_after_backward() { backward_step_.reset(); }
  bool steps_in_backward() const { return backward_step_ != nullptr; }
  /// Call it instead of step() on a rank that leaves out a step that other ranks take. The parameters do not change.
  void skip_step();
  /// Makes the optimizer keep its state where `to` says while it does not use it. Call it before there is state: before the first step, and
  /// before a checkpoint is loaded. State is on the device of its shards, so OffloadTo::Host is accepted only for shards that
  /// OffloadOptions::parameters keeps on the host, and changes nothing there. Throws ConfigError if `to` is not possible.
  void offload_state(OffloadTo to, const DiskMemoryOptions& disk = {});
  /// Makes the next step multiply the gradients by a scalar, without another pass over memory. Several factors multiply. step(),
  /// skip_step() and zero_grad() reset the factor.
  void scale_gradients(const at::Tensor& factor);
  /// Returns the norm of the gradients as the next step takes them, multiplied by the factor of scale_gradients(). Collective.
  at::Tensor grad_norm(double p = 2);
  /// Like tessera::clip_grad_norm over all parameters, but the next step does the scaling. Returns the norm before clipping. Collective.
  at::Tensor clip_grad_norm(double max_norm, double p = 2);
  /// Drops the gradients, also those that wait for a reduction (no_sync). After a step, it marks the end of that step, where a tracing
  /// engine ends its program.
  void zero_grad();

  /// The parameters of all groups.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  /// lr() is the rate of the first group. set_lr() gives that group the rate `lr`, and each other group `lr` times the ratio of the two
  /// groups' initial rates, also after a rate of 0. It throws UsageError if the first group's initial rate was 0 and another group's was
  /// not.
  double lr() const { return groups_.front().settings.lr; }
  void set_lr(double lr);

  /// The groups with their current settings, all of which are set.
  std::vector<ParameterGroup> groups() const;

  /// The options of the rule that are not settings of groups, by their names in torch::optim: {"betas", {0.9, 0.999}}. For checkpoints that
  /// Python reads.
  virtual std::map<std::string, std::vector<double>> hyperparameters() const { return {}; }

  /// The state of every parameter that has taken a step, by its name in the model. The tensors are the optimizer's own and not copies.
  std::map<std::string, ParameterState> state(ConstModuleRef model) const;
  /// Throws UsageError if load_state would.
  void expect_state(ConstModuleRef model, const std::map<std::string, ParameterState>& state);
  /// Copies a state into this optimizer. Parameters that the state does not name start without state. For a tensor on the meta device, it
  /// only allocates the memory, which the caller fills through state(). If the state does not fit, throws UsageError and changes nothing.
  void load_state(ConstModuleRef model, const std::map<std::string, ParameterState>& state);

 protected:
  struct Settings {
    double lr;
    double weight_decay;
  };
  struct Member {
    at::Tensor parameter;
    int64_t offset = 0;  // number of values from the beginning of the section
    int64_t steps = 0;
  };
  /// A kind of tensor that the rule keeps for each parameter, zero at first. It is like the parameter, but may have another dtype, or one
  /// value for each `block` values of the parameter. The name ends in _scales if the kind has one value for each block, and only then: so
  /// readers of checkpoints recognise it.
  struct StateKind {
    std::string name;
    std::optional<at::ScalarType> dtype = {};
    int64_t block = 1;
  };
  /// The argument of apply(): adjacent parameters of one unit as one tensor, or a single parameter.
  struct Item {
    at::Tensor parameter, gradient;
    std::span<const at::Tensor> state;  // one tensor for each StateKind of the section
    at::Tensor cast_copy;               // the bfloat16 copy that other ranks read, if the rule has to write it too; else undefined
    std::span<const Member> members;
    at::Tensor factor;  // multiplies the gradient; undefined for 1
  };

  /// `rule` is the name of the rule, with the options that are not in the settings. `in_blocks` are the kinds of state for parameters of at
  /// least DynamicCode::kLeast values whose shards are whole blocks on all ranks.
  Optimizer(std::vector<ParameterGroup> groups, Settings settings, std::vector<StateKind> state_kinds, std::string rule,
            std::vector<StateKind> in_blocks = {});

  /// Throws UsageError unless the value is in [0, below).
  static void expect_option(std::string_view name, double value, double below = std::numeric_limits<double>::infinity());

  /// Applies the rule to an item. `step` is the number of this step for the item's members, counted from 1.
  virtual void apply(const Settings& settings, int64_t step, const Item& item) = 0;
  /// Called before the first and after the last item of a step, for rules that must see all items before they can finish any item.
  virtual void begin_step() {}
  virtual void end_step() {}
  /// Whether the rule can update a parameter before it has seen the gradients of the other parameters.
  virtual bool can_step_in_backward() const { return true; }
  /// Whether the rule writes Item::cast_copy along with the parameter, which saves a pass over memory. Otherwise the step makes the copies
  /// after the rule has updated everything.
  virtual bool writes_cast_copies() const { return false; }

 private:
  /// Adjacent parameters of one unit, or a single parameter.
  struct Section {
    std::vector<Member> members;
    std::weak_ptr<Unit> unit;  // empty for parameters that are not sharded
    at::Tensor flat;           // a flat view over all members, or the only member itself
    bool in_blocks = false;
    std::vector<at::Tensor> state = {};
  };
  struct Releases;
  class BackwardStep;
  struct Group {
    Settings settings;
    double ratio;  // the group's initial rate divided by the first group's
    std::vector<Section> sections;
  };

  static void expect_rate(double lr);
  std::vector<Section> sections_of(std::vector<at::Tensor> parameters) const;
  std::span<const StateKind> kinds_of(const Section& section) const { return section.in_blocks ? in_blocks_ : state_kinds_; }
  static at::Tensor part(const Section& section, const at::Tensor& flat, const Member& member);
  static at::Tensor flat_gradient(const Section& section);
  void make_state(Section& section) const;
  void step_section(const Settings& settings, Section& section, const WriteGuard& guard);
  WriteKind kind_of_write() const;
  void update_all();
  bool end_backward_step();
  void refuse_in_backward(std::string_view what) const;
  std::span<const std::shared_ptr<Unit>> units_with_gradients();
  const std::string& description();
  void expect_all_synced() const;
  static void evict(const Section& section);
  static bool has_gradient(const Section& section);
  void forget_stale_factor();
  Member* find(const at::Tensor& parameter, Section*& section);

  std::vector<Group> groups_;
  const std::vector<StateKind> state_kinds_, in_blocks_;
  const std::string rule_;
  std::optional<DiskMemoryOptions> disk_;        // set if the state is kept on disk
  std::string description_;                      // what description() returns; empty until it is called
  bool ends_step_ = false;                       // whether the next zero_grad() marks the end of a step
  at::Tensor factor_;                            // multiplies the next step's gradients; undefined for 1
  uint64_t recoveries_ = 0;                      // recoveries_of() when factor_ was set
  std::vector<Communicator> worlds_;             // the worlds of the sharded parameters' meshes; nearly always one
  std::shared_ptr<Record> record_;               // of this rank; null if there is no world
  std::vector<at::Tensor> parameters_;           // the parameters of all groups
  std::vector<std::shared_ptr<Unit>> units_;     // the units of the current step; a member only so that its memory is reused
  std::shared_ptr<BackwardStep> backward_step_;  // null unless the optimizer steps in backward
};

}  // namespace tessera::optim
