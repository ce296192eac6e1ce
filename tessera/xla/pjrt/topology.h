// Compiles programs for devices that this host may lack, so that a plugin reports what the programs need there.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/xla/pjrt/device.h"
#include "tessera/xla/pjrt/options.h"
#include "tessera/xla/pjrt/plugin.h"
#include "tessera/xla/pjrt/program.h"

namespace tessera::pjrt {

class Topology {
 public:
  /// Takes the plugin's name of a topology and its options, such as "v5p:4x4x8,wrap=1,1,1" for TPUs, "h100:1x16x8" for GPUs, "cpu:8" for
  /// CPUs (see docs/xla.md). A plugin may end the process if it does not know a flag, so the command `tessera xla` makes topologies in a
  /// child process.
  Topology(Plugin plugin, const std::string& name_and_options);
  /// Returns the name of the plugin that knows the topology; empty if no plugin does.
  static std::string plugin_for(std::string_view name_and_options);

  std::vector<DeviceDescription> devices() const;
  CompiledProgram compile(const Program& program, const CompileOptions& options) const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace tessera::pjrt
