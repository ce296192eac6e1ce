// The device `xla` in torch's own Python: torch.ops.load_library() of this library, then torch.ops.tessera_xla.make_device().
#include <torch/library.h>

#include "tessera/xla/device/device.h"
#include "tessera/xla/metrics.h"

namespace tessera::xla {
namespace {

/// Names of the operators that ran on the CPU until now, and how often.
c10::Dict<std::string, int64_t> counted_fallbacks() {
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, calls] : metrics().fallbacks) counts.insert(name, calls);
  return counts;
}

TORCH_LIBRARY(tessera_xla, library) {
  library.def("make_device", [] { return make_device(); });
  library.def("step_boundary", [] { step_boundary(); });
  library.def("fallbacks", &counted_fallbacks);
  library.def("executions", [] { return metrics().executions; });
}

}  // namespace
}  // namespace tessera::xla
