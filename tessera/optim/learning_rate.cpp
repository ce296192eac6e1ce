#include "tessera/optim/learning_rate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <sstream>

#include "tessera/base/error.h"

namespace tessera::optim {
namespace {

constexpr const char* kFormat = "learning-rate-1";

void expect_sense(const LearningRate& rate) {
  const auto is_one = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!is_one(rate.base) || !is_one(rate.last) || !is_one(rate.factor)) {
    throw UsageError("a learning rate of {} (last {}, factor {}) makes no sense; give finite numbers of at least 0", rate.base, rate.last,
                     rate.factor);
  }
  if (rate.shape < LearningRate::Shape::Constant || rate.shape > LearningRate::Shape::StepsOfRun) {
    throw UsageError("a learning rate has no shape number {}; give one of LearningRate::Shape", static_cast<int>(rate.shape));
  }
  if (rate.warmup < 0 || rate.every < 1)
    throw UsageError("a learning rate has a warmup of {} steps, which must be at least 0, and changes every {} steps, which must be at least 1",
                     rate.warmup, rate.every);
  const bool goes_down = rate.shape == LearningRate::Shape::Cosine || rate.shape == LearningRate::Shape::Linear;
  if (goes_down && rate.steps <= rate.warmup) {
    throw UsageError(
        "a {} over {} steps, of which {} are warm-up, has no steps left to go down; give .steps, the length of the run, "
        "including the warm-up",
        rate.shape == LearningRate::Shape::Cosine ? "cosine" : "line", rate.steps, rate.warmup);
  }
}

}  // namespace

double LearningRate::at(int64_t step) const {
  expect_sense(*this);
  if (step < 0) throw UsageError("there is no learning rate for step {}; steps count from 0", step);
  if (step < warmup) return base * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const auto progress = [&] { return std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(steps - warmup)); };
  switch (shape) {
    case Shape::Constant:
      break;
    case Shape::Steps:
      return base * std::pow(factor, static_cast<double>((step - warmup) / every));
    case Shape::Cosine:
      return last + (base - last) * 0.5 * (1 + std::cos(std::numbers::pi * progress()));
    case Shape::Linear:
      return last + (base - last) * (1 - progress());
    case Shape::StepsOfRun:
      return base * std::pow(factor, static_cast<double>(step / every));
  }
  return base;
}

std::string LearningRate::save() const {
  return fmt::format("{} {} {} {} {} {} {} {}", kFormat, base, static_cast<int>(shape), warmup, factor, every, steps, last);
}

LearningRate LearningRate::load(const std::string& text) {
  std::istringstream in(text);
  std::string format;
  LearningRate rate;
  int shape = 0;
  in >> format >> rate.base >> shape >> rate.warmup >> rate.factor >> rate.every >> rate.steps >> rate.last;
  if (std::string more; !in || format != kFormat || in >> more)
    throw UsageError("'{}' does not describe a learning rate; pass a text that LearningRate::save has returned", text);
  rate.shape = static_cast<Shape>(shape);
  expect_sense(rate);
  return rate;
}

}  // namespace tessera::optim
