// The `tessera` program: a thin command line over the library.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "tessera/cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app("Tessera shards the training of libtorch models. Each command explains itself with --help.", "tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);
  tessera::cli::add_launch_command(app);
  tessera::cli::add_ckpt_command(app);
  tessera::cli::add_test_command(app);
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& end) {
    return app.exit(end);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return 1;
  }
}
