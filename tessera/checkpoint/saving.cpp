#include <ATen/core/grad_mode.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/live/save.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {

void save(const std::filesystem::path& folder, const Contents& contents, const Communicator& world, const SaveOptions& options) {
  const c10::AutoGradMode no_grad(false);
  Save save(folder, contents, world, options);
  const auto together = [&](c10::function_ref<void()> act) {
    AllOrNone step;
    step.attempt(act);
    step.expect_all(world, {.unit = "checkpoint"}, save.failure());
  };
  try {
    together([&] { save.write(contents_of_ranks(save.number(), contents, world)); });
    together([&] { save.commit(); });
  } catch (const CommError&) {
    save.abandon();
    throw;
  }
}

}  // namespace tessera::checkpoint
