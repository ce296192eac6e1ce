#include "tessera/optim/grad_scaler.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/optim/any_optimizer.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/access/gradients.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/training.h"

namespace tessera::optim {
namespace {

constexpr const char* kScalerFormat = "grad-scaler-1";

void expect_sense(const GradScalerOptions& options) {
  const auto is_one = [](double value) { return std::isfinite(value) && value > 0; };
  if (is_one(options.init_scale) && is_one(options.growth_factor) && options.growth_factor >= 1 && is_one(options.backoff_factor) &&
      options.backoff_factor <= 1 && options.growth_interval >= 1)
    return;
  throw UsageError(
      "a GradScaler with init_scale {}, growth_factor {}, backoff_factor {} and growth_interval {} makes no sense; give an "
      "init_scale above 0, a growth_factor of at least 1, a backoff_factor above 0 and at most 1, and a growth_interval of at least 1",
      options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval);
}

// The functions below that take an optimizer have overloads for those of Tessera and of torch::optim.

void multiply_gradients_now(const std::vector<at::Tensor>& parameters, double factor) {
  const BelowPaging below;
  for (const auto& parameter : parameters) {
    auto gradient = parameter.grad();
    if (!gradient.defined()) continue;
    if (gradient.scalar_type() == at::kHalf) {
      throw UsageError(
          "a gradient in float16 can't be unscaled, because small values would become zero again; train float32 parameters with a "
          "param_dtype, or use an optimizer of Tessera");
    }
    gradient.mul_(factor);
  }
}

/// Lets the next step scale the gradients, without another pass over memory.
void multiply_gradients_in_step(Optimizer& optimizer, double factor) {
  optimizer.scale_gradients(at::scalar_tensor(factor, at::kFloat));
}

void multiply_gradients_in_step(torch::optim::Optimizer& optimizer, double factor) {
  multiply_gradients_now(parameters_of(&optimizer), factor);
}

void expect_not_in_backward(const Optimizer& optimizer) {
  if (!optimizer.steps_in_backward()) return;
  throw UsageError(
      "GradScaler: the optimizer steps in backward, so it has already taken the gradients of the scaled loss; call step_after_backward() "
      "before the first scaled loss, and load the last checkpoint");
}
void expect_not_in_backward(const torch::optim::Optimizer& /*optimizer*/) {}

void skip(Optimizer& optimizer) {
  optimizer.skip_step();
}

void skip(torch::optim::Optimizer& optimizer) {
  skip_step(parameters_of(&optimizer));
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options, int64_t growth_tracker)
    : options_(options), scale_(options.init_scale), growth_tracker_(growth_tracker) {
  expect_sense(options);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  // The scale is a float32 tensor and not a number, because a float16 loss times a number stays float16 and would overflow.
  return options_.enabled ? loss * at::scalar_tensor(scale_, loss.options().dtype(at::kFloat)) : loss;
}

/// Returns the progress of the optimizer's gradients, or null if they have not been unscaled. Forgets the progress of gradients that
/// tessera::recover has dropped.
template <class O>
GradScaler::Progress* GradScaler::progress_of(O& optimizer) {
  const auto known = progress_.find(&optimizer);
  if (known == progress_.end()) return nullptr;
  if (known->second.recoveries == recoveries_of(parameters_of(&optimizer))) return &known->second;
  progress_.erase(known);
  return nullptr;
}

template <class O>
void GradScaler::unscale_any(O& optimizer, bool now) {
  if (!options_.enabled) return;
  if (const auto* known = progress_of(optimizer); known != nullptr) {
    throw UsageError("GradScaler::unscale_ was called {} for this optimizer; call it once between two updates",
                     known->stepped ? "after step()" : "twice");
  }
  expect_idle("GradScaler::unscale_");
  expect_not_in_backward(optimizer);
  const auto parameters = parameters_of(&optimizer);
  const bool finite = gradients_are_finite(parameters);
  if (now) {
    multiply_gradients_now(parameters, 1 / scale_);
  } else {
    multiply_gradients_in_step(optimizer, 1 / scale_);
  }
  progress_[&optimizer] = {.finite = finite, .recoveries = recoveries_of(parameters)};
}

template <class O>
bool GradScaler::step_any(O& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (progress_of(optimizer) == nullptr) unscale_any(optimizer, /*now=*/false);
  auto& progress = progress_.at(&optimizer);
  if (progress.stepped) throw UsageError("GradScaler::step was called twice for this optimizer; call update() after each step");
  progress.stepped = true;
  if (progress.finite) {
    optimizer.step();
  } else {
    skip(optimizer);
  }
  return progress.finite;
}

void GradScaler::unscale_(Optimizer& optimizer) {
  unscale_any(optimizer, /*now=*/true);
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  unscale_any(optimizer, /*now=*/true);
}

bool GradScaler::step(Optimizer& optimizer) {
  return step_any(optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  return step_any(optimizer);
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (progress_.empty())
    throw UsageError("GradScaler::update was called, but no gradients were checked since the last update; call step(optimizer) first");
  bool finite = true;
  for (const auto& [optimizer, progress] : progress_) finite = finite && progress.finite;
  progress_.clear();
  if (!finite) {
    scale_ *= options_.backoff_factor;
    growth_tracker_ = 0;
  } else if (++growth_tracker_ == options_.growth_interval) {
    const auto larger = scale_ * options_.growth_factor;
    if (std::isfinite(static_cast<float>(larger))) scale_ = larger;
    growth_tracker_ = 0;
  }
}

std::string GradScaler::save() const {
  return fmt::format("{} {} {} {} {} {} {}", kScalerFormat, scale_, options_.growth_factor, options_.backoff_factor,
                     options_.growth_interval, growth_tracker_, options_.enabled ? 1 : 0);
}

GradScaler GradScaler::load(const std::string& text) {
  std::istringstream in(text);
  std::string format;
  GradScalerOptions options;
  int64_t tracker = 0;
  in >> format >> options.init_scale >> options.growth_factor >> options.backoff_factor >> options.growth_interval >> tracker >>
      options.enabled;
  if (std::string more; !in || format != kScalerFormat || tracker < 0 || in >> more)
    throw UsageError("'{}' does not describe a GradScaler; pass a text that GradScaler::save has returned", text);
  return GradScaler(options, tracker);
}

}  // namespace tessera::optim
