#include "train.h"

#include <torch/torch.h>

#include <memory>
#include <variant>

#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/sgd.h"
#include "tests/testing/folder.h"

namespace tessera::parity {
namespace {

constexpr int kSteps = 3;

/// One of Tessera's optimizers, or of torch's, with a scaler if the case has one.
class Optimizer {
 public:
  Optimizer(const Case& test, const Trainee& trainee) {
    const auto trained = trainee.trained();
    const bool adamw = test.get("optimizer", std::string("sgd")) == "adamw";
    if (trainee.is_sharded() && test.has("ours")) {
      std::unique_ptr<optim::Optimizer> ours;
      if (adamw) {
        ours = std::make_unique<optim::AdamW>(trained, optim::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
      } else {
        ours = std::make_unique<optim::SGD>(trained, optim::SgdOptions{.lr = 0.1, .momentum = 0.5});
      }
      if (test.has("offload")) ours->offload_state(OffloadTo::Disk, disk_for_tests());
      if (test.has("in_backward")) ours->step_in_backward();
      optimizer_ = std::move(ours);
    } else if (adamw) {
      optimizer_ = std::make_unique<torch::optim::AdamW>(trained, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    } else {
      optimizer_ = std::make_unique<torch::optim::SGD>(trained, torch::optim::SGDOptions(0.1).momentum(0.5));
    }
    if (test.has("scale")) scaler_.emplace(optim::GradScalerOptions{.init_scale = test.get("scale", 1.0), .growth_interval = 2});
  }

  at::Tensor scale(const at::Tensor& loss) const { return scaler_ ? scaler_->scale(loss) : loss; }
  void unscale() {
    if (scaler_) std::visit([&](auto& any) { scaler_->unscale_(*any); }, optimizer_);
  }
  void step() {
    if (scaler_) {
      std::visit([&](auto& any) { scaler_->step(*any); }, optimizer_);
      scaler_->update();
    } else {
      std::visit([](auto& any) { any->step(); }, optimizer_);
    }
    std::visit([](auto& any) { any->zero_grad(); }, optimizer_);
  }
  checkpoint::OptimizerRef ref() const {
    return std::visit([](auto& any) { return checkpoint::OptimizerRef(any.get()); }, optimizer_);
  }

 private:
  std::variant<std::unique_ptr<optim::Optimizer>, std::unique_ptr<torch::optim::Optimizer>> optimizer_;
  std::optional<optim::GradScaler> scaler_;
};

/// Which numbers a pass of this rank takes. Branches differ among the ranks only if the case is about that.
int64_t shift_of(const Case& test, int step, int pass, int rank) {
  const bool branches = test.model == "branches";
  return 100 * step + 10 * pass + (branches && !test.has("unused") ? 0 : rank) + (branches ? step % 2 : 0);
}

double mean(const Communicator& world, const at::Tensor& loss) {
  const auto value = loss.detach().clone();
  world.all_reduce(value, {.op = Reduce::Mean}).wait();
  return value.item<double>();
}

}  // namespace

DiskMemoryOptions disk_for_tests() {
  return {.folder = testing::folder_on_disk()};
}

std::ostream& operator<<(std::ostream& out, const Bytes& bytes) {
  out << bytes.gathered << " + " << bytes.reduced;
  if (bytes.all_reduced > 0) out << " + " << bytes.all_reduced;
  return out;
}

Result train(const Communicator& world, const Case& test, Trainee& trainee) {
  Optimizer optimizer(test, trainee);
  const auto clip = test.get("clip_norm", nlohmann::json{{"p", "2"}});
  const auto p = std::stod(clip.at("p").get<std::string>());
  Result result;
  for (int step = 0; step < kSteps; step++) {
    trainee.reset_received();
    const int passes = test.get("passes", 1);
    at::Tensor loss;
    for (int pass = 0; pass < passes; pass++) {
      loss = trainee.loss(shift_of(test, step, pass, world.rank()));
      trainee.backward(optimizer.scale(loss), /*last=*/pass == passes - 1);
    }
    result.received = trainee.received();
    trainee.finish_gradients();
    if (!test.has("in_backward")) {
      optimizer.unscale();
      result.norms.push_back(trainee.norm(p).item<double>());
      if (test.has("clip_norm")) trainee.clip_norm(clip.at("max"), p);
      if (test.has("clip_value")) torch::nn::utils::clip_grad_value_(trainee.trained(), test.get("clip_value", 0.0));
    }
    optimizer.step();
    result.losses.push_back(mean(world, loss));
  }
  result.state = trainee.state(optimizer.ref());
  return result;
}

}  // namespace tessera::parity
