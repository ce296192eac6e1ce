// A run as Python has it: its names, dtypes and values.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"

namespace tessera::checkpoint {

/// The model's tensors as in Python's state dicts: a tied parameter is there under each of its names.
std::vector<std::pair<std::string, const SourceTensor*>> named_model(const RunSource& source);

/// The tensors of the state that an optimizer of Python keeps, too.
std::vector<SourceTensor> python_state(const RunSource& source);

/// The notes that stand beside the model and the optimizer.
std::map<std::string, nlohmann::json> values_of_notes(const RunSource& source);

/// The state of torch's generator; undefined if the run has none.
at::Tensor generator_of(const RunSource& source, int rank);

}  // namespace tessera::checkpoint
