// Average: an exponential moving average of a model's parameters (EMA), on the shards, so that no rank ever has all of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/module_ref.h"

namespace torch::nn {
class Module;
}

namespace tessera::optim {

struct AverageOptions {
  double decay = 0.999;  // in [0, 1): average = decay * average + (1 - decay) * parameter
};

/// A copy of a model's weights that follows them slowly: for evaluation, or as the teacher of a student. The copy is sharded like the
/// parameters, in at least float32. Make it after fully_shard. It starts as a copy of the parameters when it is made or, if they have no
/// values then (Start::Loaded) and no average is loaded, at its first use. A model may have several averages, of which one at a time can be
/// swapped in.
class Average {
 public:
  explicit Average(std::shared_ptr<torch::nn::Module> model, AverageOptions options = {});
  Average(const Average&) = delete;
  Average& operator=(const Average&) = delete;
  ~Average();

  /// Moves the average towards the parameters. Call it after each step.
  void update();
  /// Makes the average equal to the parameters.
  void assign();
  /// Returns this rank's shards of the average by the names of the parameters in `model`, which may contain the averaged model. For
  /// checkpoints (Contents::average).
  std::map<std::string, at::Tensor> state(ConstModuleRef model) const;
  /// Throws UsageError if the average can't be saved together with the model, for example during a swap.
  void expect_savable();
  /// Call it after loading the model and the average: it ends a swap that an exception left open.
  void was_loaded();

  /// While a Swapped exists, the model has the average in place of its own parameters; the destructor restores them. Meanwhile update(),
  /// assign(), another average of these parameters, a second swap, and writes to sharded parameters are errors; loading the model is
  /// allowed and ends the swap. Saving the model saves the average. Construction and destruction are collective. If an exception destroys
  /// the Swapped, the model keeps the average, because the other ranks may not reach this collective: see restore().
  class Swapped {
   public:
    explicit Swapped(Average& average);
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;
    ~Swapped() noexcept(false);

   private:
    Average& average_;
    const int exceptions_;  // number of uncaught exceptions at construction
  };
  [[nodiscard]] Swapped swapped() { return Swapped(*this); }
  /// Gives the model its own parameters back if an exception has ended swapped(). All ranks call it, after recover(). Collective.
  void restore();

 private:
  struct Member {
    at::Tensor parameter, average;
    at::Tensor own = {};  // the parameter's values while the average takes their place
  };
  void expect_usable(const char* what);
  /// Throws UsageError if another average is in the place of parameters that this one follows.
  void expect_alone(const char* what) const;
  /// Throws UsageError if the parameters have been sharded since this average was made.
  void expect_shards() const;
  void begin(const char* what);
  void copy_parameters();
  void expect_same() const;
  void put_in();
  bool is_swapped();
  void forget_own();

  const std::shared_ptr<torch::nn::Module> model_;
  const AverageOptions options_;
  std::vector<Member> members_;
  int64_t updates_ = 0;  // number of updates since the average was made, assigned or loaded
  bool has_begun_ = false, is_swapped_ = false;
};

}  // namespace tessera::optim
