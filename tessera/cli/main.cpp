// The `tessera` program: a thin command line over the library.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/output.h"

namespace {

/// Throws if the command is unknown, with the known ones; CLI11 would only say that a command is missing.
void expect_command(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; })) names.push_back(command->get_name());
  if (std::ranges::find(names, argv[1]) != names.end()) return;
  throw tessera::ConfigError(fmt::format("there is no command '{}'; choose one of {}", argv[1], fmt::join(names, ", ")));
}

/// Throws if something that was printed did not reach standard output.
void expect_printed() {
  const int reason = std::fflush(stdout) == 0 ? 0 : errno;
  if (reason == 0 && std::ferror(stdout) == 0) return;
  throw tessera::IoError(
      fmt::format("standard output can't be written: {}", reason == 0 ? "an earlier write failed" : std::strerror(reason)));
}

}  // namespace

int main(int argc, char** argv) {
  tessera::cli::occupy_standard_streams();
  CLI::App app("Tessera shards the training of libtorch models. Each command explains itself with --help.", "tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);
  tessera::cli::add_launch_command(app);
  tessera::cli::add_ckpt_command(app);
  tessera::cli::add_test_command(app);
  try {
    expect_command(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& end) {
      if (const int status = app.exit(end); status != 0) return status;
    }
    expect_printed();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return 1;
  }
}
