// Commands that need another package than the core. A package has them in a module beside the library, libtessera_cli_NAME.so, which
// registers here what it adds when the program loads it.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Adds a command to the command line. Once that is read, `chosen` runs the command that was given.
using AddCommand = void (*)(CLI::App& parent, std::function<int()>& chosen);

/// Registers a command, such as "data", while its module is loaded.
struct AddedCommand {
  AddedCommand(const std::string& name, AddCommand add);
};

/// Loads the modules of the packages that were built.
void load_packages();

/// Throws ConfigError if a package is not there. `what` needs it: "tessera data".
void expect_package(const std::string& package, std::string_view what);

/// Adds the command of a package or, if the package is not there, one that says so.
void add_command_of(const std::string& package, const std::string& name, CLI::App& parent, std::function<int()>& chosen);

}  // namespace tessera::cli
