// Options of init(): which XLA devices, and whether programs run.
#pragma once

#include <string>

namespace tessera::xla {

/// Whether programs run.
enum class Programs {
  Run,
  /// Traces programs and writes them to the folder TESSERA_XLA_PROGRAMS, for a compiler of devices that are not here: loads no plugin,
  /// gives no tensor memory, and returns zeros for every read. TESSERA_XLA_TRACE_ONLY sets this in any process.
  Traced,
};

struct XlaOptions {
  /// The number of replicas of every tensor, each with values of its own on a device of its own: the ranks of the communicator. 0 means
  /// TESSERA_XLA_DEVICES or, if that is unset, all devices of the plugin; a CPU plugin then makes 1.
  int devices = 0;
  /// A plugin's name or path; TESSERA_PJRT_PLUGIN or "cpu" if empty.
  std::string plugin = {};
  Programs programs = Programs::Run;
};

}  // namespace tessera::xla
