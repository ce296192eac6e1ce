#include "tessera/train/meters.h"

#include <ATen/ATen.h>

#include <limits>
#include <numeric>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

double ratio(double sum, double samples) {
  return samples > 0 ? sum / samples : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

void Mean::add(const at::Tensor& mean, int64_t samples) {
  if (samples == 0) return;  // the mean of no samples is NaN
  const auto part = mean.detach().to(at::kDouble) * samples;
  sum_ = sum_.defined() ? sum_ + part : part;
  samples_ += samples;
}

double Mean::value() const {
  return ratio(sum_.defined() ? sum_.item<double>() : 0, static_cast<double>(samples_));
}

double Mean::value(const Communicator& world) const {
  const auto own = sum_.defined() ? sum_.item<double>() : 0;
  auto total = at::tensor({own, static_cast<double>(samples_)}, at::TensorOptions(at::kDouble).device(world.traits().device));
  world.all_reduce(total, {}, {.unit = "a mean over samples"}).wait();
  return ratio(total[0].item<double>(), total[1].item<double>());
}

RunningMean::RunningMean(int64_t values) : most_(static_cast<size_t>(values)) {
  if (values < 1) throw UsageError("a running mean can't be of {} values; give one or more", values);
}

double RunningMean::add(double value) {
  values_.push_back(value);
  if (values_.size() > most_) values_.pop_front();
  return std::accumulate(values_.begin(), values_.end(), 0.0) / static_cast<double>(values_.size());
}

at::Tensor accuracy(const at::Tensor& scores, const at::Tensor& targets) {
  return scores.detach().argmax(1).eq(targets).to(at::kDouble).mean();
}

}  // namespace tessera::train
