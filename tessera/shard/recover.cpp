#include "tessera/shard/recover.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/shard/model.h"
#include "tessera/shard/schedule.h"
#include "tessera/shard/unit.h"

namespace tessera {
namespace {

const Subject kMeeting = {.unit = "tessera::recover"};

/// Ranks that are still in operations of the pass hear there that this one is here, and come.
void meet(const Communicator& world) {
  for (;;) {
    try {
      return world.barrier(kMeeting);
    } catch (const DisagreementError&) {
      continue;
    }
  }
}

/// Throws unless all ranks have taken the same steps with each unit.
void expect_same_versions(const std::vector<std::shared_ptr<Unit>>& all, const Communicator& world) {
  const auto versions = at::empty({static_cast<int64_t>(all.size())}, at::kLong);
  for (size_t i = 0; i < all.size(); i++) versions[static_cast<int64_t>(i)] = static_cast<int64_t>(all[i]->next_version());
  const auto extremes = at::stack({versions, -versions});
  world.all_reduce(extremes, {.op = Reduce::Max}, kMeeting).wait();
  for (size_t i = 0; i < all.size(); i++) {
    const auto most = extremes[0][static_cast<int64_t>(i)].item<int64_t>(), least = -extremes[1][static_cast<int64_t>(i)].item<int64_t>();
    if (most == least) continue;
    throw CommError(
        fmt::format("unit '{}' has taken {} steps on one rank and {} on another, so the ranks can't go on together; load a checkpoint",
                    all[i]->name(), least, most));
  }
}

}  // namespace

void recover(const torch::nn::Module& model) {
  const c10::AutoGradMode no_grad(false);
  const auto all = units(model);
  std::vector<Communicator> groups;
  for (const auto& unit : all) {
    unit->schedule()->abandon_pass();
    for (const auto* group : {&unit->mesh().shard(), &unit->mesh().replicate(), &unit->mesh().world()}) {
      if (std::ranges::none_of(groups, [&](const Communicator& known) { return known.same_group(*group); })) groups.push_back(*group);
    }
  }
  for (const auto& group : groups) meet(group);
  for (const auto& unit : all) unit->start_anew();
  for (const auto& group : groups) expect_same_versions(all, group);
}

}  // namespace tessera
