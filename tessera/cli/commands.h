// The commands of the `tessera` program: each function adds one to the command line. After parsing, `chosen` runs the command that was given.
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

/// `tessera top`: shows a recorded run while it runs.
void add_top_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera env`: describes this machine and this build, for bug reports.
void add_env_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera completion`: prints a script by which a shell completes all commands of `app`.
void add_completion_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera manual`, which no help lists: writes the man pages of all commands of `app` into a folder, for an installation.
void add_manual_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera ckpt`: works on checkpoints outside of a training run.
void add_ckpt_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera config`: makes, changes, explains and converts configurations. `tessera to-fsdp2` is one of its parts.
void add_config_command(CLI::App& app, std::function<int()>& chosen);

/// `tessera report`: makes a page of recorded runs, with advice.
void add_report_command(CLI::App& app, std::function<int()>& chosen);

}  // namespace tessera::cli
