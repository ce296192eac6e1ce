#include "tessera/train/utilisation.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/product_speed.h"
#include "tessera/base/words.h"
#include "tessera/comm/run_facts.h"

namespace tessera::train {
namespace {

constexpr auto kPeakVariable = "TESSERA_PEAK_FLOPS";

std::optional<double> peak_of_environment() {
  const auto text = env(kPeakVariable);
  if (!text) return std::nullopt;
  const auto peak = number_of<double>(*text);
  if (!peak || !(*peak > 0)) throw ConfigError("{} '{}' is not a number of operations per second, such as 312e12", kPeakVariable, *text);
  return peak;
}

}  // namespace

Utilisation::Utilisation(const Communicator& world, at::ScalarType dtype)
    : world_(world), dtype_(dtype), given_peak_(peak_of_environment()), is_done_(world.traits().traces || world.traits().simulated) {}

void Utilisation::step_begins() {
  if (!is_done_ && steps_ > 0) counter_.emplace();
}

bool Utilisation::step_ended(int64_t batches) {
  steps_++;
  if (!counter_) return false;
  measure(batches);
  return true;
}

void Utilisation::measure(int64_t batches) {
  const double flops = counter_->flops();
  counter_.reset();
  is_done_ = true;
  const at::TensorOptions options(world_.traits().device);
  if (!given_peak_) {
    world_.barrier({.unit = "utilisation"});  // so that all ranks compute at once
    given_peak_ = product_speed(options.dtype(dtype_), world_.traits().device.is_cpu() ? 512 : 4096);
  }
  const auto sums = at::tensor({flops, *given_peak_}, at::kDouble).to(world_.traits().device);
  world_.all_reduce(sums, {}, {.unit = "utilisation"}).wait();
  flops_of_batch_ = sums[0].item<double>() / static_cast<double>(batches);
  peak_ = sums[1].item<double>();
  record_facts(world_, {{"flops_per_step", sums[0].item<double>()}, {"peak_flops", peak_}});
}

std::optional<Value> Utilisation::at(double batches_per_second) const {
  if (!(flops_of_batch_ > 0)) return std::nullopt;
  return Value{.name = "mfu", .value = flops_of_batch_ * batches_per_second / peak_, .unit = Unit::Part};
}

}  // namespace tessera::train
