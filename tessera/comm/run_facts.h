// Facts about a run for `run.json` in the folder of TESSERA_RECORD.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace tessera {

class Communicator;

/// Merges the members of an object into run.json: {{"flops_per_step", 1e12}, {"peak_flops", 2e14}}. Only the rank that writes the file does
/// something, and only if the run of this world is recorded. Throws UsageError if `facts` is not an object.
void record_facts(const Communicator& world, const nlohmann::json& facts);

}  // namespace tessera
