// The `tessera` program: a thin command line over the library.
#include <cstdio>
#include <functional>

#include "tessera/cli/commands.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/launch/other_launchers.h"
#include "tessera/cli/output.h"
#include "tessera/cli/packages.h"
#include "tessera/version.h"

int main(int argc, char** argv) {
  tessera::cli::occupy_standard_streams();
  tessera::cli::Program app("Tessera shards the training of libtorch models. Each command explains itself with --help.", "tessera");
  app.require_subcommand(1);
  app.set_version_flag("-V,--version", TESSERA_VERSION, "Print the version and exit");
  app.add_flag_callback("--cmake-prefix", [] { throw CLI::CallForVersion(tessera::cli::cmake_prefix(), 0); },
                        "Print the folder for CMAKE_PREFIX_PATH, in which find_package(Tessera) finds this installation, and exit");
  app.set_reasons(tessera::cli::reason_against);
  std::function<int()> chosen;
  tessera::cli::load_packages();
  tessera::cli::add_config_command(app, chosen);
  tessera::cli::add_command_of("models", "plan", app, chosen);
  tessera::cli::add_launch_command(app, chosen);
  tessera::cli::add_top_command(app, chosen);
  tessera::cli::add_ckpt_command(app, chosen);
  tessera::cli::add_command_of("models", "data", app, chosen);
  tessera::cli::add_command_of("models", "llm", app, chosen);
  tessera::cli::add_report_command(app, chosen);
  tessera::cli::add_test_command(app, chosen);
  tessera::cli::add_command_of("xla", "xla", app, chosen);
  tessera::cli::add_env_command(app, chosen);
  tessera::cli::add_completion_command(app, chosen);
  tessera::cli::add_manual_command(app, chosen);
  auto* version = app.add_subcommand("version", "Prints the version, as --version does");
  version->callback([&chosen] {
    chosen = [] { return std::puts(TESSERA_VERSION) < 0 ? tessera::cli::kFailed : 0; };
  });
  version->footer(tessera::cli::Help::footer_of({"tessera version"}));
  // known_arguments() turns `help COMMAND` into `COMMAND --help`; the command `help` is added only to be listed.
  app.add_subcommand("help", "Explains a command: tessera help launch")->footer(tessera::cli::Help::footer_of({"tessera help launch"}));
  // Set last, because a command that is added takes the footer that the program has by then.
  app.footer(tessera::cli::Help::footer_of({"tessera launch -n 2 ./train --epochs 3", "tessera ckpt inspect run/mnist", "tessera env"}));
  return app.run(argc, argv, [&] { return chosen(); });
}
