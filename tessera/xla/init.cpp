#include "tessera/xla/init.h"

#include <algorithm>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/comm/engines.h"
#include "tessera/comm/joined_world.h"
#include "tessera/xla/communicator/communicator.h"
#include "tessera/xla/device/device.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/pjrt/plugin.h"

namespace tessera::xla {
namespace {

std::string why_no_xla() {
  const auto plugins = pjrt::installed_plugins();
  if (env("TESSERA_PJRT_PLUGIN") || std::ranges::find(plugins, "cpu", &pjrt::InstalledPlugin::name) != plugins.end()) return {};
  return "no PJRT plugin is installed; `pip install xla-cpu-pjrt` brings one for CPUs";
}

/// Returns the world of this process's device. If there is no device yet, makes it over all devices of the plugin.
Communicator world_of_devices() {
  if (has_device()) return replica_world();
  return init();
}

void run_replicas(int replicas, const Engine::Program& program, std::chrono::milliseconds limit) {
  program(init({.devices = replicas}).with_limit(limit));
}

// The table of engines is in a lower layer that may not include this folder, so this file adds the row of the engine xla.
const AddedEngine kXlaEngine({.name = "xla", .ranks = "devices of this process, in one program", .device = c10::DeviceType::XLA, .why_not = why_no_xla, .alone = world_of_devices, .run = run_replicas});

}  // namespace

Communicator init(const XlaOptions& options) {
  if (const auto identity = identity_from_environment(); identity && identity->world_size > 1) {
    throw ConfigError(
        "one process has all XLA devices, and stands for all their ranks, but this is rank {} of {} processes; start one by `tessera launch "
        "--distributed-type XLA`, or by --nproc-per-node 1 with TESSERA_XLA_DEVICES set to the number of devices",
        identity->rank, identity->world_size);
  }
  auto chosen = options;
  if (chosen.devices == 0) chosen.devices = static_cast<int>(env_int("TESSERA_XLA_DEVICES", 1, 1'000'000).value_or(0));
  make_device(chosen);
  return remember_joined(replica_world());
}

}  // namespace tessera::xla
