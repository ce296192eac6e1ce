// What a program says of the XLA devices that it wants.
#pragma once

#include <string>

namespace tessera::xla {

struct XlaOptions {
  /// Replicas of every tensor, each with its own values, on a device of its own: the ranks of the communicator.
  int devices = 1;
  /// A plugin's name or path; TESSERA_PJRT_PLUGIN or "cpu" if empty.
  std::string plugin = {};
};

}  // namespace tessera::xla
