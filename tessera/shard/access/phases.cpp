#include "tessera/shard/access/phases.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/base/error.h"
#include "tessera/shard/forward_phase.h"

namespace tessera {

void expect_idle(std::string_view what) {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    throw UsageError(
        fmt::format("{} was called during backward, in a hook or in a backward function; call it when backward() has returned", what));
  }
  if (const auto module = forward_phase()) {
    throw UsageError(fmt::format("{} was called during the forward of '{}'; call it when that has returned", what, *module));
  }
}

}  // namespace tessera
