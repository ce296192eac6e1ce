// Keeps compiled programs on disk, for later processes that need the same programs.
#pragma once

#include <filesystem>
#include <optional>

#include "tessera/xla/pjrt/client.h"

namespace tessera::pjrt {

/// A folder of compiled programs. A program's key includes all that decides its code: the plugin's bytes, the devices, the processor (for
/// CPUs), the options, XLA_FLAGS and the text. Several processes may share the folder. If a file can't be read or written, the program is
/// compiled as without a cache, and the first such error is logged as a warning.
class ProgramCache {
 public:
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}
  /// Returns the cache in TESSERA_XLA_CACHE or in the user's cache folder; nothing if the variable is "none", or if no such folder is
  /// known.
  static std::optional<ProgramCache> of_this_user();

  struct Found {
    Executable executable;
    bool was_there = false;
  };
  Found compile(const Client& client, const Program& program, const CompileOptions& options) const;
  /// Keeps a program that was compiled for devices that this host lacks, for a later client that has such devices.
  void keep(const Plugin& plugin, const std::vector<DeviceDescription>& devices, const Program& program, const CompileOptions& options,
            const CompiledProgram& compiled) const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  void keep(const std::string& key, const CompiledProgram& compiled) const;

  std::filesystem::path folder_;
};

}  // namespace tessera::pjrt
