#include "tessera/shard/recover.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

const Subject kMeeting = {.unit = kRecovery};

/// Appends the group, and all groups that meshes have made of it, unless they are listed.
void add_with_parts(std::vector<Communicator>& groups, const Communicator& group) {
  const auto known = groups.size();
  if (find_or_add(groups, group) < known) return;
  for (const auto& part : group.parts()) add_with_parts(groups, part);
}

/// All groups in which ranks may be waiting while they use these units.
std::vector<Communicator> groups_of(const std::vector<std::shared_ptr<Unit>>& all, const Communicator& everyone) {
  std::vector<Communicator> groups;
  add_with_parts(groups, everyone);
  for (const auto& unit : all) {
    for (const auto* group : {&unit->mesh().world(), &unit->mesh().shard(), &unit->mesh().replicate()}) add_with_parts(groups, *group);
  }
  return groups;
}

/// Waits for all works, even if some of them throw, and then throws the first error.
void wait_for_all(std::span<const Work> works) {
  std::exception_ptr error;
  for (const auto& work : works) {
    try {
      work.wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

/// Returns why the ranks can't continue together: they have taken different numbers of steps with a unit, or an error ended a step in the
/// middle. Empty if they can continue. Collective over the world of the units.
std::string difference_in_steps(const std::vector<std::shared_ptr<Unit>>& all, const Communicator& world) {
  std::string steps;
  uint64_t first_broken = all.size();
  for (size_t i = 0; i < all.size(); i++) {
    const LockedState state(*all[i]);
    const auto& versions = state->versions;
    steps += fmt::format("unit '{}'\thas taken {} steps\n", all[i]->name(), versions.next_version());
    if (versions.write_broke_off()) first_broken = std::min<uint64_t>(first_broken, i);
  }
  if (const auto found = difference_on_ranks(world, steps, kMeeting); !found.empty()) {
    return fmt::format("the ranks can't continue together; load a checkpoint: {}", found);
  }
  if (const auto broken = world.extremes(first_broken, kMeeting).least; broken < all.size()) {
    return fmt::format(
        "an error ended a step before it wrote unit '{}', and an optimizer other than Tessera's may have changed its own state already; "
        "load a checkpoint",
        all[broken]->name());
  }
  return {};
}

/// Throws CommError on all ranks if some ranks can't continue together.
void expect_same_steps(const std::vector<std::shared_ptr<Unit>>& all, const Communicator& everyone) {
  std::vector<Communicator> worlds;
  std::vector<std::vector<std::shared_ptr<Unit>>> units_in;
  for (const auto& unit : all) {
    const auto place = find_or_add(worlds, unit->mesh().world());
    units_in.resize(worlds.size());
    units_in[place].push_back(unit);
  }
  std::string difference;
  for (size_t i = 0; i < worlds.size(); i++) {
    auto found = difference_in_steps(units_in[i], worlds[i]);
    if (difference.empty()) difference = std::move(found);
  }
  // Ranks that have no part of a unit must not continue without the ranks that have a part of it.
  all_or_none(everyone, kMeeting, "can't continue", [&] {
    if (!difference.empty()) throw CommError(difference);
  });
}

/// Abandons the reductions and steps that the unit has begun, and drops its gradients.
void reset(Unit& unit) {
  const LockedState state(unit);
  state->reduction.abandon();
  state->versions.reset();
  unit.flags().recoveries++;
  for (const auto& parameter : parameters_of(unit)) parameter.shard.mutable_grad() = at::Tensor();
}

}  // namespace

void recover(ModuleRef model) {
  const c10::AutoGradMode no_grad(false);
  const auto all = units(model);
  const auto everyone = world_of(model);
  if (!everyone) return;
  // Meets in all groups at once, because other ranks may be waiting for this rank in any of them.
  std::vector<Work> meetings;
  for (const auto& group : groups_of(all, *everyone)) meetings.push_back(group.meet(kMeeting));
  for (const auto& unit : all) unit->schedule()->abandon_pass();
  wait_for_all(meetings);
  for (const auto& unit : all) reset(*unit);
  expect_same_steps(all, *everyone);
}

}  // namespace tessera
