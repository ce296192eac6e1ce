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

  /// Precedence: flag, environment, file (`--config-file`, else config::usual_file()).
  /// On a single host, the ranks that --nproc-per-node asks for win over num_processes of the file.
  config::Settings settings(std::optional<int> ranks_here) const;

 private:
  // Shared, because the command keeps references to them.
  std::shared_ptr<std::string> file_ = std::make_shared<std::string>();
  std::shared_ptr<std::map<std::string, std::string>> values_ = std::make_shared<std::map<std::string, std::string>>();
};

}  // namespace tessera::cli
