// A run as Python has it: tensors and values, with the keys on the way to each. Files of torch.save nest them; DCP joins the keys to names.
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
  /// A tensor of the run, a tensor of rank 0, or a plain value of rank 0. Nothing is an empty dict, of which DCP has no trace.
  std::variant<std::monostate, SourceTensor, at::Tensor, pickle::Value> what = {};
};
using PythonEntries = std::vector<PythonEntry>;

/// The model's tensors as in Python's state dicts: a tied parameter is there under each of its names.
PythonEntries python_model(const RunSource& source);
/// The optimizer's state and its settings. If they are numbered, parameters have numbers, as in optimizer.state_dict(), and the groups have
/// their names; throws UsageError if their order is not known.
PythonEntries python_optimizer(const RunSource& source, bool numbered = false);
/// All but the generators. Throws UsageError for notes that would be taken for a part of the model or the optimizer.
PythonEntries python_run(const RunSource& source);

/// The state of torch's generator; undefined if the run has none.
at::Tensor generator_of(const RunSource& source, int rank);

/// Writes a folder of torch.distributed.checkpoint, each rank its part of the tensors. Collective; `entries` may fail on some ranks.
void write_dcp_folder(const RunSource& source, const std::filesystem::path& folder, c10::function_ref<PythonEntries()> entries);
/// Writes a file of torch.save, without the first `depth` keys of the entries, with the number of the save if it is one of several files.
/// Collective.
void write_torch_file(const RunSource& source, const std::filesystem::path& path, const PythonEntries& entries, size_t depth = 0,
                      std::optional<uint64_t> save = {});

}  // namespace tessera::checkpoint
