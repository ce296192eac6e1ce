// Writes the files of a run that `tessera xla program` reads: the text of each program, its figures and its counters.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/xla/metrics.h"
#include "tessera/xla/pjrt/program.h"

namespace tessera::xla {

/// Writes PROCESS_NUMBER.mlir for each program, and PROCESS.json at most once a second and at the end; PROCESS is the process's id. Leaves
/// out a file that can't be written, and warns once.
class ProgramFolder {
 public:
  /// Makes the folder that TESSERA_XLA_PROGRAMS names, or returns nothing if that is unset. Throws IoError if the folder can't be made.
  static std::optional<ProgramFolder> of_this_run(const std::string& platform, int replicas);

  /// Writes the text of a program before it is compiled, because compiling may end the process.
  void begin(const std::string& text);
  /// Adds the figures of the program that was compiled from the last text. Without a program, leaves its row empty.
  void end(const std::optional<pjrt::CompiledProgram>& program);
  void note(const Metrics& metrics);
  void finish(const Metrics& metrics);

 private:
  ProgramFolder(std::filesystem::path folder, const std::string& platform, int replicas);
  void write(const std::string& name, const std::string& text) const;

  std::filesystem::path folder_;
  std::shared_ptr<nlohmann::ordered_json> run_;
  std::vector<size_t> compiled_;  // for each of Metrics::programs, its index in `run_`
  std::chrono::steady_clock::time_point written_;
};

}  // namespace tessera::xla
