// Options of init(): which XLA devices, and whether programs run.
#pragma once

#include <string>

namespace tessera::xla {

/// Whether traced programs are compiled and run.
enum class Programs {
  Run,
  /// Only traces programs and writes them to the folder TESSERA_XLA_PROGRAMS, to be compiled for devices that this host lacks: no plugin is
  /// loaded, tensors have no memory, and every read returns zeros. TESSERA_XLA_TRACE_ONLY=N sets this in any process, with N replicas.
  Traced,
};

struct XlaOptions {
  /// The number of replicas, which are the ranks of the communicator. Every tensor has one value for each replica, and each replica has its
  /// own device. 0 means TESSERA_XLA_DEVICES or, if that is unset, all devices of the plugin; a CPU plugin then makes 1.
  int devices = 0;
  /// A plugin's name or path; TESSERA_PJRT_PLUGIN or "cpu" if empty.
  std::string plugin = {};
  Programs programs = Programs::Run;
};

}  // namespace tessera::xla
