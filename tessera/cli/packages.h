// Finds the installation of this program, and loads commands that need another package than the core. Each package has its commands in a
// module, libtessera_cli_NAME.so next to the library, which registers them here when it is loaded.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace CLI {
class App;
}

namespace tessera::cli {

/// A function that adds a command to the command line. After parsing, `chosen` runs the command that was given.
using AddCommand = void (*)(CLI::App& parent, std::function<int()>& chosen);

/// Its constructor registers a command, such as "data". A module has global objects of this type, so its commands are registered when the
/// program loads it.
struct AddedCommand {
  AddedCommand(const std::string& name, AddCommand add);
};

/// Loads the modules of the packages that were built.
void load_packages();

/// Returns the folder in which Tessera is installed, or throws ConfigError if this program runs from a build folder.
std::string cmake_prefix();

/// Throws ConfigError if the package was not loaded. `what` names the command that needs it: "tessera data".
void expect_package(const std::string& package, std::string_view what);

/// Adds the command of a package or, if the package was not loaded, a command of the same name that throws an error about that.
void add_command_of(const std::string& package, const std::string& name, CLI::App& parent, std::function<int()>& chosen);

}  // namespace tessera::cli
