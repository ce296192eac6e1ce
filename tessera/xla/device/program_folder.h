// What a run leaves for `tessera xla program`: the text of each of its programs, and what they need and did.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "tessera/xla/metrics.h"
#include "tessera/xla/pjrt/program.h"

namespace tessera::xla {

/// PROCESS_NUMBER.mlir for each program, and PROCESS.json, which is written at most once a second, and at the end. What can't be written is
/// left out, with a warning once.
class ProgramFolder {
 public:
  /// TESSERA_XLA_PROGRAMS; nothing if that is unset. Throws IoError if there can be no such folder.
  static std::optional<ProgramFolder> of_this_run(const std::string& platform, int replicas);

  /// Before the program is compiled: if that ends the process, its text is what one needs.
  void begin(const std::string& text);
  /// What the last text has become: nothing if it is not compiled here.
  void end(const std::optional<pjrt::CompiledProgram>& program);
  void note(const Metrics& metrics);
  void finish(const Metrics& metrics);

 private:
  ProgramFolder(std::filesystem::path folder, const std::string& platform, int replicas);
  void write(const std::string& name, const std::string& text) const;

  std::filesystem::path folder_;
  std::shared_ptr<nlohmann::ordered_json> run_;
  std::chrono::steady_clock::time_point written_;
};

}  // namespace tessera::xla
