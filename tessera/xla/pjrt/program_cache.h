// Compiled programs on disk, for the next process that needs the same.
#pragma once

#include <filesystem>
#include <optional>

#include "tessera/xla/pjrt/client.h"

namespace tessera::pjrt {

/// A folder of compiled programs, each known by all that decides what a compiler makes: the plugin's bytes, the devices, the processor if it is
/// theirs, the options, the text. Processes may share it. What can't be read or written is compiled anew, with a warning once.
class ProgramCache {
 public:
  explicit ProgramCache(std::filesystem::path folder) : folder_(std::move(folder)) {}
  /// TESSERA_XLA_CACHE, or a folder of the user's; nothing if that is "none".
  static std::optional<ProgramCache> of_this_user();

  struct Found {
    Executable executable;
    bool was_there = false;
  };
  Found compile(const Client& client, const Program& program, const CompileOptions& options) const;
  /// What was compiled for devices that are not here, for a client that has such ones.
  void keep(const Plugin& plugin, const std::vector<DeviceDescription>& devices, const Program& program, const CompileOptions& options,
            const CompiledProgram& compiled) const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  void keep(const std::string& key, const CompiledProgram& compiled) const;

  std::filesystem::path folder_;
};

}  // namespace tessera::pjrt
