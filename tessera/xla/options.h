// What a program says of the XLA devices that it wants.
#pragma once

#include <string>

namespace tessera::xla {

/// What becomes of programs.
enum class Programs {
  Run,
  /// They are traced, and left where TESSERA_XLA_PROGRAMS says, for a compiler of devices that are not here: no plugin is loaded, no tensor has
  /// memory, and whoever reads one gets zeros. TESSERA_XLA_TRACE_ONLY makes any program one of these.
  Traced,
};

struct XlaOptions {
  /// Replicas of every tensor, each with its own values, on a device of its own: the ranks of the communicator. With 0 as many as
  /// TESSERA_XLA_DEVICES says, or all devices of the plugin; one for CPUs makes 1.
  int devices = 0;
  /// A plugin's name or path; TESSERA_PJRT_PLUGIN or "cpu" if empty.
  std::string plugin = {};
  Programs programs = Programs::Run;
};

}  // namespace tessera::xla
