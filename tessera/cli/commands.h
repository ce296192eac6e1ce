// The commands of the `tessera` program: each adds itself to the command line. Once that is read, `chosen` is what it asks for.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tessera::cli {

/// `tessera test`: runs the conformance checks of the transports on this machine.
void add_test_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera launch`: starts a program as several ranks on this host.
void add_launch_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera ckpt`: works on checkpoints outside of a training run.
void add_ckpt_command(CLI::App& app, std::function<int()>& chosen);

}  // namespace tessera::cli
