// PJRT plugins: shared libraries that compile and run XLA programs on one kind of device.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/xla/pjrt/options.h"

namespace tessera::pjrt {

class Api;

class Plugin {
 public:
  /// Loads a plugin by a name that installed_plugins() finds ("cpu", "tpu", "cuda") or by its library's path, each library once in a
  /// process. Throws ConfigError if there is no such plugin; the message names the wheels that have it.
  static Plugin load(const std::string& name_or_path);
  /// Loads the plugin that TESSERA_PJRT_PLUGIN names, or "cpu".
  static Plugin load();

  const std::filesystem::path& file() const;
  /// The version of the PJRT interface that the plugin was built with, such as "0.81".
  std::string version() const;
  /// The plugin's description of itself, such as the versions of StableHLO that it reads.
  Options attributes() const;

  const std::shared_ptr<const Api>& api() const { return api_; }

 private:
  explicit Plugin(std::shared_ptr<const Api> api) : api_(std::move(api)) {}

  std::shared_ptr<const Api> api_;
};

struct InstalledPlugin {
  std::string name;  // the kind of device
  std::string wheel;
  std::filesystem::path file;
};
/// Finds plugins in Python wheels: next to libtorch, in the active virtual environment, with the first python3 in PATH, and below /usr/local,
/// /usr and ~/.local. Of several plugins with one name, load() takes the first.
std::vector<InstalledPlugin> installed_plugins();

}  // namespace tessera::pjrt
