// The commands of the `tessera` program: each adds itself to the command line.
#pragma once

namespace CLI {
class App;
}

namespace tessera::cli {

/// `tessera test`: runs the conformance checks of the transports on this machine.
void add_test_command(CLI::App& app);

/// `tessera launch`: starts a program as several ranks on this host.
void add_launch_command(CLI::App& app);

/// `tessera ckpt`: works on checkpoints outside of a training run.
void add_ckpt_command(CLI::App& app);

}  // namespace tessera::cli
