// Checks that all ranks make the same unit: parameters of the same names, shapes and dtypes in the same order, and the same options.
#pragma once

#include <span>
#include <string>

#include "tessera/shard/options.h"
#include "tessera/shard/unit/managed_parameter.h"

namespace tessera {

/// Throws DisagreementError on all ranks, before anything is changed, if they make different units. The error names the first difference,
/// and which ranks have which value. Collective over the world of the mesh, unless the other ranks are simulated or traced.
void expect_same_unit(const std::string& name, std::span<const ManagedParameter> sharded, std::span<const ManagedParameter> replicated,
                      const ShardOptions& options);

}  // namespace tessera
