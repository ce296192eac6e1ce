// Trains a case with Tessera, or replicated.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "case.h"
#include "tessera/base/disk_memory.h"
#include "tessera/checkpoint/optimizer_ref.h"
#include "tessera/comm/communicator.h"

namespace tessera::parity {

/// What a rank receives in a step.
struct Bytes {
  int64_t gathered = 0, reduced = 0, all_reduced = 0;
  friend bool operator==(const Bytes&, const Bytes&) = default;
};
std::ostream& operator<<(std::ostream& out, const Bytes& bytes);

struct Result {
  std::vector<double> losses;               // means over the ranks, one for each step
  std::vector<double> norms;                // of all gradients; none if the optimizer steps in backward
  std::map<std::string, at::Tensor> state;  // of the model, and with the prefix "optimizer." of the optimizer
  Bytes received;                           // in the last step, up to the end of backward
};

Result train_with_tessera(const Communicator& world, const Case& test);
/// Every rank has a copy of the model, in plain libtorch. What is special in the case is computed as the guides define it.
Result train_replicated(const Communicator& world, const Case& test);

/// For cases that keep values on disk.
DiskMemoryOptions disk_for_tests();

/// A model that is trained in one of these ways.
class Trainee {
 public:
  Trainee(Communicator world, const Case& test) : world_(std::move(world)), test_(test) {}
  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;
  virtual ~Trainee() = default;

  virtual std::vector<at::Tensor> trained() const = 0;
  /// Whether Tessera's own optimizers train it, if the case says so.
  virtual bool is_sharded() const = 0;

  /// The forward pass with these numbers, and the loss.
  virtual at::Tensor loss(int64_t shift) = 0;
  /// Runs a backward pass: the last one before the step, or an earlier one.
  virtual void backward(const at::Tensor& loss, bool last) = 0;
  /// After the last backward pass.
  virtual void finish_gradients() = 0;
  virtual at::Tensor norm(double p) const = 0;
  virtual void clip_norm(double max, double p) const = 0;

  virtual std::map<std::string, at::Tensor> state(const checkpoint::OptimizerRef& optimizer) const = 0;
  virtual Bytes received() const = 0;
  virtual void reset_received() = 0;

 protected:
  const Communicator world_;
  const Case& test_;
};

/// The training loop, the same for all.
Result train(const Communicator& world, const Case& test, Trainee& trainee);

}  // namespace tessera::parity
