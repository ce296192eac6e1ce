#include "tessera/cli/packages.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <filesystem>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/process.h"

namespace tessera::cli {
namespace {

std::map<std::string, AddCommand>& commands() {
  static std::map<std::string, AddCommand> all;
  return all;
}

/// Why each package could not be loaded; empty for a package that was loaded.
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
    // The name has no folder, so that dlopen looks for the module where this program looks for the library.
    if (dlopen(fmt::format("libtessera_cli_{}.so", package).c_str(), RTLD_NOW) == nullptr) fault = dlerror();
  }
}

std::string cmake_prefix() {
  const auto prefix = std::filesystem::path(this_program()).parent_path().parent_path();
  if (std::filesystem::exists(prefix / TESSERA_LIBDIR / "cmake/Tessera/TesseraConfig.cmake")) return prefix;
  throw ConfigError("{} is not installed with its CMake package: cmake --install BUILD --prefix FOLDER, and then ask FOLDER/bin/tessera",
                    this_program());
}

void expect_package(const std::string& package, std::string_view what) {
  const auto& fault = faults().at(package);
  if (fault.empty()) return;
  throw ConfigError(
      "{} needs Tessera's package {}, which could not be loaded ({}); in Tessera's folder, build all of it (cmake --build build){}, and install it "
      "again if this is an installation",
      what, package, fault, package == "xla" ? " where the wheel xla-cpu-pjrt is beside libtorch" : "");
}

void add_command_of(const std::string& package, const std::string& name, CLI::App& parent, std::function<int()>& chosen) {
  if (const auto known = commands().find(name); known != commands().end()) return known->second(parent, chosen);
  auto* missing = parent.add_subcommand(name, fmt::format("Needs the package {}, which could not be loaded", package));
  missing->prefix_command();
  const auto whole_name = fmt::format("tessera {}{}", parent.get_parent() == nullptr ? "" : parent.get_name() + " ", name);
  missing->callback([&chosen, package, whole_name] {
    chosen = [=] {
      expect_package(package, whole_name);
      return 0;
    };
  });
}

}  // namespace tessera::cli
