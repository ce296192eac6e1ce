// The flags of a command for all keys of a configuration: --mixed-precision, --fsdp-sharding-strategy and so on.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "tessera/config/settings.h"

namespace CLI {
class App;
}

namespace tessera::cli {

class ConfigFlags {
 public:
  /// Adds the flags, and --config-file.
  explicit ConfigFlags(CLI::App& command);

  /// Returns the settings. A flag wins over the environment, and the environment over the file (`--config-file`, or else
  /// config::usual_file()). `ranks_here` is the value of --nproc-per-node. On a single host it sets num_processes, unless the flag
  /// --num-processes is given.
  config::Settings settings(std::optional<int> ranks_here) const;

 private:
  // Shared, because the command keeps references to them.
  std::shared_ptr<std::string> file_ = std::make_shared<std::string>();
  std::shared_ptr<std::map<std::string, std::string>> values_ = std::make_shared<std::map<std::string, std::string>>();
};

}  // namespace tessera::cli
