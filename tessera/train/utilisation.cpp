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
    : world_(world), dtype_(dtype), own_peak_(peak_of_environment()), is_done_(world.traits().traces || world.traits().simulated) {}

void Utilisation::step_begins() {
  if (!is_done_ && !is_first_) counter_.emplace();
}

bool Utilisation::step_ended(int64_t batches) {
  is_first_ = false;
  if (!counter_) return false;
  const double flops = counter_->flops();
  counter_.reset();
  is_done_ = true;
  const auto device = world_.traits().device;
  world_.barrier({.unit = "utilisation"});  // so that all ranks compute at once
  if (!own_peak_) own_peak_ = product_speed(at::TensorOptions(device).dtype(dtype_), device.is_cpu() ? 512 : 4096);
  const auto sums = at::tensor({flops, *own_peak_}, at::kDouble).to(device);
  world_.all_reduce(sums, {}, {.unit = "utilisation"}).wait();
  const auto flops_of_all = sums[0].item<double>(), peak = sums[1].item<double>();
  utilisation_of_batch_ = flops_of_all / static_cast<double>(batches) / peak;
  record_facts(world_, {{"flops_per_step", flops_of_all}, {"peak_flops", peak}});
  return true;
}

std::optional<Value> Utilisation::at(double batches_per_second) const {
  if (!(utilisation_of_batch_ > 0)) return std::nullopt;
  return Value{.name = "mfu", .value = utilisation_of_batch_ * batches_per_second, .unit = Unit::Part};
}

}  // namespace tessera::train
