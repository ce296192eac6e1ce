#include "tessera/shard/recover.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/shard/unit/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/unit_state.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

const Subject kMeeting = {.unit = kRecovery};

/// Waits until all ranks are in this barrier. A rank that is still in a collective of the failed pass gets a DisagreementError there, and
/// comes; so does this one, and it tries again.
void meet(const Communicator& world) {
  for (;;) {
    try {
      return world.barrier(kMeeting);
    } catch (const DisagreementError&) {
      continue;
    }
  }
}

/// Throws CommError unless all ranks have taken the same number of steps with each unit, and no rank has broken off in the middle of one.
void expect_same_steps(const std::vector<std::shared_ptr<Unit>>& all, const Communicator& world) {
  std::vector<int64_t> own;
  for (const auto& unit : all) {
    const auto held = unit->schedule()->lock();
    const auto& versions = unit->state(held).versions;
    const auto version = static_cast<int64_t>(versions.next_version());
    own.insert(own.end(), {version, -version, versions.write_broke_off()});
  }
  const auto found = at::tensor(own, at::kLong).to(world.traits().device);
  world.all_reduce(found, {.op = Reduce::Max}, kMeeting).wait();
  const auto on_host = found.cpu();
  const auto most = on_host.accessor<int64_t, 1>();
  int64_t row = 0;
  for (const auto& unit : all) {
    const auto last = most[row], first = -most[row + 1], broke_off = most[row + 2];
    row += 3;
    if (last != first) {
      throw CommError(
          fmt::format("unit '{}' has taken {} steps on one rank and {} on another, so the ranks can't go on together; load a checkpoint",
                      unit->name(), first, last));
    }
    if (broke_off != 0) {
      throw CommError(
          fmt::format("a step broke off before it wrote unit '{}', and an optimizer that is none of Tessera's may have changed its own "
                      "state already; load a checkpoint",
                      unit->name()));
    }
  }
}

/// Abandons what the unit was doing and drops its gradients.
void start_anew(Unit& unit) {
  const auto held = unit.schedule()->lock();
  auto& state = unit.state(held);
  state.reduction.abandon();
  state.versions.start_anew();
  unit.count_recovery();
  for (const auto& group : unit.groups()) {
    for (const auto& parameter : group.parameters) parameter.shard.mutable_grad() = at::Tensor();
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
      find_or_add(groups, *group);
    }
  }
  for (const auto& group : groups) meet(group);
  for (const auto& unit : all) start_anew(*unit);
  for (const auto& group : groups) expect_same_steps(all, group);
}

}  // namespace tessera
