// A run as Python programs save it: tensors and values, with the dict keys that lead to each. Files of torch.save have nested dicts; DCP
// joins the keys to names.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <variant>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"

namespace tessera::checkpoint {

struct PythonEntry {
  DcpPath path;
  /// A tensor of the run, a tensor of rank 0, or a plain value of rank 0. std::monostate is an empty dict, which DCP does not store.
  std::variant<std::monostate, SourceTensor, at::Tensor, pickle::Value> what = {};
};
using PythonEntries = std::vector<PythonEntry>;

/// The model's tensors as in Python's state dicts: a tied parameter has an entry for each of its names.
PythonEntries python_model(const RunSource& source);
/// The optimizer's state and its settings. With `numbered`, the state identifies parameters by numbers, as in optimizer.state_dict(), and
/// each group also lists the names of its parameters; throws UsageError if the order of the parameters is not known.
PythonEntries python_optimizer(const RunSource& source, bool numbered = false);
/// Returns the model, the optimizer, extra tensors and notes: everything but the generators. Throws UsageError for notes whose names would
/// make them a part of the model or the optimizer.
PythonEntries python_run(const RunSource& source);

/// The state of torch's generator; undefined if the run has none.
at::Tensor generator_of(const RunSource& source, int rank);

/// Writes a folder of torch.distributed.checkpoint; each rank writes its part of the tensors. Collective; `entries` may throw on any rank.
void write_dcp_folder(const RunSource& source, const std::filesystem::path& folder, c10::function_ref<PythonEntries()> entries);
/// Writes a file of torch.save, which leaves out the first `depth` keys of each entry. If the save has several files, `save` is its number.
/// Collective.
void write_torch_file(const RunSource& source, const std::filesystem::path& path, const PythonEntries& entries, size_t depth = 0,
                      std::optional<uint64_t> save = {});

}  // namespace tessera::checkpoint
