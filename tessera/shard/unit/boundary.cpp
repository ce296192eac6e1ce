#include "tessera/shard/unit/boundary.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <map>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/base/sweep.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

struct Known {
  std::weak_ptr<const torch::nn::Module> module;  // a new module may have the address of an earlier one
  Boundary boundary;
};

struct KnownBoundaries {
  std::mutex mutex;
  std::map<const torch::nn::Module*, Known> modules;
  Sweep sweep;
};

KnownBoundaries& known_boundaries() {
  static KnownBoundaries instance;
  return instance;
}

}  // namespace

void expect_floating(const MixedPrecision& precision) {
  const auto expect = [](const char* name, std::optional<at::ScalarType> dtype) {
    if (!dtype || at::isFloatingType(*dtype)) return;
    throw UsageError(fmt::format("{} is {}, which has no fractions; give a floating-point dtype", name, c10::toString(*dtype)));
  };
  expect("param_dtype", precision.param_dtype);
  expect("reduce_dtype", precision.reduce_dtype);
  expect("grad_dtype", precision.grad_dtype);
  expect("buffer_dtype", precision.buffer_dtype);
  expect("output_dtype", precision.output_dtype);
}

void set_boundary(torch::nn::Module& module, const ShardOptions& options, const std::shared_ptr<Unit>& unit,
                  size_t units_of_parameters) {
  const auto& precision = options.mixed_precision;
  Boundary boundary{.output_dtype = precision.output_dtype, .unit = unit, .has_units = units_of_parameters > 0};
  if (precision.cast_forward_inputs.value_or(true)) boundary.input_dtype = compute_dtype_of(options);
  auto& known = known_boundaries();
  const std::lock_guard lock(known.mutex);
  known.sweep(known.modules, [](const auto& entry) { return entry.second.module.expired(); });
  known.modules[&module] = {.module = module.weak_from_this(), .boundary = std::move(boundary)};
}

std::optional<Boundary> boundary_of(const torch::nn::Module& module) {
  auto& known = known_boundaries();
  const std::lock_guard lock(known.mutex);
  const auto found = known.modules.find(&module);
  if (found == known.modules.end() || found->second.module.lock().get() != &module) return std::nullopt;
  return found->second.boundary;
}

}  // namespace tessera
