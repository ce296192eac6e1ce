// A model in plain libtorch, of which every rank has a copy.
#include <torch/torch.h>

#include "models.h"
#include "train.h"

namespace tessera::parity {
namespace {

class Replicated final : public Trainee {
 public:
  Replicated(const Communicator& world, const Case& test) : Trainee(world, test), model_(make_model(test.model)), computing_(model_) {
    const auto dtype = test.dtype("param_dtype");
    if (dtype) computing_ = make_model(test.model);
    for (const auto& model : {model_, computing_}) {
      for (auto& parameter : parameters_of(*model, test.names("frozen"))) parameter.set_requires_grad(false);
    }
    kept_ = distinct_parameters(*model_);
    used_ = distinct_parameters(*computing_);
    sums_.resize(kept_.size());
    means_.resize(kept_.size());
    if (!dtype) return;
    for (auto& parameter : used_) parameter.set_data(parameter.detach().to(*dtype));
    // Batch norm computes in float32, with parameters and statistics that are kept narrower.
    for (const auto& module : computing_->modules()) {
      if (module->as<torch::nn::BatchNorm2d>() == nullptr) continue;
      for (auto& parameter : module->parameters()) parameter.set_data(parameter.detach().to(at::kFloat));
    }
  }

  std::vector<at::Tensor> trained() const override {
    auto result = kept_;
    std::erase_if(result, [](const at::Tensor& parameter) { return !parameter.requires_grad(); });
    return result;
  }
  bool is_sharded() const override { return false; }

  at::Tensor loss(int64_t shift) override {
    if (computing_ != model_) {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < kept_.size(); i++) used_[i].copy_(kept_[i].to(dtype()));
    }
    auto input = computing_->input(shift);
    if (input.is_floating_point()) input = input.to(dtype());
    return computing_->loss(computing_->forward(input).to(at::kFloat), shift);
  }
  void backward(const at::Tensor& loss, bool last) override {
    loss.backward();
    const torch::NoGradGuard no_grad;
    for (auto& buffer : computing_->buffers()) {
      if (const auto narrow = test_.dtype("buffer_dtype"); narrow && buffer.is_floating_point()) buffer.copy_(buffer.to(*narrow));
    }
    const bool reduces = last || !test_.has("accumulate");
    for (size_t i = 0; i < kept_.size(); i++) {
      auto& pass = used_[i].mutable_grad();
      if (!pass.defined() && test_.has("unused")) pass = at::zeros_like(used_[i]);
      if (pass.defined()) {
        const auto wide = pass.to(dtype()).to(at::kFloat);
        sums_[i] = sums_[i].defined() ? sums_[i] + wide : wide;
        pass = at::Tensor();
      }
      if (!reduces || !sums_[i].defined()) continue;
      const auto mean = mean_of(sums_[i]);
      means_[i] = means_[i].defined() ? means_[i] + mean : mean;
      sums_[i] = at::Tensor();
    }
  }
  void finish_gradients() override {
    for (size_t i = 0; i < kept_.size(); i++) kept_[i].mutable_grad() = std::exchange(means_[i], at::Tensor());
  }
  at::Tensor norm(double p) const override {
    std::vector<at::Tensor> norms;
    for (const auto& parameter : kept_) {
      if (parameter.grad().defined()) norms.push_back(at::linalg_vector_norm(parameter.grad(), p));
    }
    return at::linalg_vector_norm(at::stack(norms), p);
  }
  void clip_norm(double max, double p) const override {
    const auto factor = at::clamp(max / (norm(p) + 1e-6), 0, 1);
    for (const auto& parameter : trained()) parameter.grad().mul_(factor);
  }

  std::map<std::string, at::Tensor> state(const checkpoint::OptimizerRef& /*optimizer*/) const override {
    std::map<std::string, at::Tensor> result;
    for (const auto& parameter : model_->named_parameters()) result[parameter.key()] = parameter.value().detach();
    for (const auto& buffer : computing_->named_buffers()) {
      const auto value = buffer.value().clone();
      world_.broadcast(value).wait();
      result[buffer.key()] = value;
    }
    return result;
  }
  Bytes received() const override { return {}; }
  void reset_received() override {}

 private:
  at::ScalarType dtype() const { return test_.dtype("param_dtype").value_or(at::kFloat); }

  at::Tensor mean_of(const at::Tensor& sum) const {
    const bool divides = test_.has("divide");
    const auto before = divides ? sum / test_.settings["divide"][0].get<double>() : sum;
    const auto sent = before.to(test_.dtype("reduce_dtype").value_or(at::kFloat)).to(at::kFloat).clone(at::MemoryFormat::Contiguous);
    world_.all_reduce(sent, {.op = divides ? Reduce::Sum : Reduce::Mean}).wait();
    return divides ? sent / test_.settings["divide"][1].get<double>() : sent;
  }

  std::shared_ptr<Model> model_, computing_;  // two if parameters are kept and computed with in different dtypes
  std::vector<at::Tensor> kept_, used_;       // their parameters
  std::vector<at::Tensor> sums_;              // of the gradients of this rank that are not reduced yet
  std::vector<at::Tensor> means_;             // of those that are, over the ranks
};

}  // namespace

Result train_replicated(const Communicator& world, const Case& test) {
  Replicated replicated(world, test);
  return train(world, test, replicated);
}

}  // namespace tessera::parity
