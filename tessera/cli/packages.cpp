#include "tessera/cli/packages.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/device/own_device.h"

namespace tessera::cli {
namespace {

std::map<std::string, AddCommand>& commands() {
  static std::map<std::string, AddCommand> all;
  return all;
}

std::string module_of(const std::string& package) {
  return fmt::format("libtessera_cli_{}.so", package);
}

/// Why a package is not there; empty if it is.
std::map<std::string, std::string>& faults() {
  static std::map<std::string, std::string> all = {{"models", {}}, {"xla", {}}};
  return all;
}

}  // namespace

AddedCommand::AddedCommand(const std::string& name, AddCommand add) {
  commands()[name] = add;
}

void load_packages() {
  for (auto& [package, fault] : faults()) {
    // By its name alone it is looked for where this program looks for the library.
    if (dlopen(module_of(package).c_str(), RTLD_NOW) == nullptr) fault = dlerror();
  }
}

void expect_package(const std::string& package, std::string_view what) {
  const auto& fault = faults().at(package);
  if (fault.empty()) return;
  // Otherwise something that the module needs is missing or broken, and building it would not help.
  const bool is_unbuilt = fault.starts_with(module_of(package) + ": cannot open");
  const auto remedy = package == "xla" ? why_none_of("xla") : fmt::format("cmake --build build --target tessera_cli_{} builds it", package);
  throw ConfigError(fmt::format("{} needs Tessera's package {}, which is not here ({}){}", what, package, fault, is_unbuilt ? "; " + remedy : ""));
}

void add_command_of(const std::string& package, const std::string& name, CLI::App& parent, std::function<int()>& chosen) {
  if (const auto known = commands().find(name); known != commands().end()) return known->second(parent, chosen);
  auto* missing = parent.add_subcommand(name, fmt::format("Needs the package {}, which is not here", package))->group("Commands");
  missing->prefix_command();
  missing->footer(" ");
  missing->callback([&chosen, package, name] {
    chosen = [=] {
      expect_package(package, name);
      return 0;
    };
  });
}

}  // namespace tessera::cli
