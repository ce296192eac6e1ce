// The device `xla` in torch's own Python: torch.ops.load_library() of this library, then torch.ops.tessera_xla.make_device().
#include <torch/library.h>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/xla/device/device.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/pjrt/topology.h"

namespace tessera::xla {
namespace {

/// Names of the operators that ran on the CPU until now, and how often.
c10::Dict<std::string, int64_t> counted_fallbacks() {
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, calls] : metrics().fallbacks) counts.insert(name, calls);
  return counts;
}

/// How often each program has run, in the order of TESSERA_XLA_PROGRAMS.
std::vector<int64_t> runs_of_programs() {
  std::vector<int64_t> runs;
  for (const auto& program : metrics().programs) runs.push_back(program.executions);
  return runs;
}

/// Why the compiler for TPUs refuses the program in a file for a topology, which is one for the whole process; empty if it takes it.
std::string tpu_refusal(const std::string& topology, const std::string& file) {
  static const pjrt::Topology devices(pjrt::Plugin::load("tpu"), topology);
  if (file.empty()) return "";  // it is loaded
  try {
    (void)devices.compile({.text = InputFile(file).read_all(), .parameters = {}}, {.effort = 9});
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TORCH_LIBRARY(tessera_xla, library) {
  library.def("make_device", [] { return make_device(); });
  library.def("step_boundary", [] { step_boundary(); });
  library.def("fallbacks", &counted_fallbacks);
  library.def("executions", [] { return metrics().executions; });
  library.def("runs_of_programs", &runs_of_programs);
  library.def("tpu_refusal", &tpu_refusal);
}

}  // namespace
}  // namespace tessera::xla
