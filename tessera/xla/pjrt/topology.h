// Devices that need not be there: a plugin's compiler says what a program would need on them.
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
  /// "v5p:4x4x8,wrap=1,1,1": the plugin's name for it and options, see docs/xla.md; "h100:1x16x8" of that for GPUs, "cpu:8" of those for
  /// CPUs. A plugin may end the process over a flag that it does not know, so a program that must go on asks the command `tessera xla`, which
  /// has a process for each.
  Topology(Plugin plugin, const std::string& name_and_options);
  /// The name of the plugin that knows a topology by its name, or nothing.
  static std::string plugin_for(std::string_view name_and_options);

  std::vector<DeviceDescription> devices() const;
  CompiledProgram compile(const Program& program, const CompileOptions& options) const;

 private:
  class Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace tessera::pjrt
