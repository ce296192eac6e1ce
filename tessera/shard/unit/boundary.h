// Boundary: what fully_shard was told about calls of a module.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>

#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

struct Boundary {
  std::optional<at::ScalarType> input_dtype = {},
                                output_dtype = {};  // of floating-point inputs and outputs; they stay as they are if unset
  std::weak_ptr<Unit> unit = {};                    // that was made of the module; none if all of its parameters are in other units
  bool has_units = false;                           // the module had parameters in units then
};

/// Throws UsageError if a dtype of the options is none of floating-point numbers.
void expect_floating(const MixedPrecision& precision);

/// Remembers the boundary of a module as long as the module exists. It must be owned by a shared_ptr, as registered modules and those in
/// holders are; for any other it does nothing. `units_of_parameters`: how many units its parameters are in.
void set_boundary(torch::nn::Module& module, const ShardOptions& options, const std::shared_ptr<Unit>& unit, size_t units_of_parameters);

/// None if fully_shard was not called for the module.
std::optional<Boundary> boundary_of(const torch::nn::Module& module);

}  // namespace tessera
