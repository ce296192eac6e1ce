// Average: an exponential moving average of a model's parameters (EMA), on the shards, so that no rank ever has all of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::optim {

struct AverageOptions {
  double decay = 0.999;  // in [0, 1): average = decay * average + (1 - decay) * parameter
};

/// A copy of a model's weights that follows them slowly: for evaluation, or as the teacher of a student. The copy is divided among the
/// ranks as the parameters are. It begins with the parameters as they are.
class Average {
 public:
  explicit Average(std::shared_ptr<torch::nn::Module> model, AverageOptions options = {});

  /// Moves the average towards the parameters. Call it after each step.
  void update();
  /// Makes the average equal to the parameters, as after a checkpoint of the average was loaded into the model.
  void assign();

  /// While it exists, the model has the average in place of its own parameters, which it gets back in the end. The model must not be
  /// trained meanwhile. Saving the model then saves the average. Making and destroying it are collective.
  class Swapped {
   public:
    explicit Swapped(Average& average) : average_(average) { average_.swap(); }
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;
    ~Swapped() noexcept(false) { average_.swap(); }

   private:
    Average& average_;
  };
  [[nodiscard]] Swapped swapped() { return Swapped(*this); }

 private:
  struct Member {
    at::Tensor parameter, average;
  };
  void swap();

  const std::shared_ptr<torch::nn::Module> model_;
  const AverageOptions options_;
  std::vector<Member> members_;
};

}  // namespace tessera::optim
