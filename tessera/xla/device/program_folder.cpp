#include "tessera/xla/device/program_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <mutex>
#include <nlohmann/json.hpp>

#include "tessera/base/atomic_write.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/xla/pjrt/figures.h"

namespace tessera::xla {

ProgramFolder::ProgramFolder(std::filesystem::path folder, const std::string& platform, int replicas) : folder_(std::move(folder)) {
  make_folder(folder_);
  run_ = std::make_shared<nlohmann::ordered_json>();
  *run_ = {{"process", ::getpid()}, {"platform", platform}, {"replicas", replicas}, {"programs", nlohmann::ordered_json::array()}};
}

std::optional<ProgramFolder> ProgramFolder::of_this_run(const std::string& platform, int replicas) {
  const auto path = env("TESSERA_XLA_PROGRAMS");
  return path ? std::optional(ProgramFolder(*path, platform, replicas)) : std::nullopt;
}

void ProgramFolder::write(const std::string& name, const std::string& text) const {
  try {
    write_text(folder_ / name, text);
  } catch (const IoError& error) {
    static std::once_flag once;
    std::call_once(once, [&] { log(LogLevel::Warning, "programs are not written to the folder TESSERA_XLA_PROGRAMS: {}", error.what()); });
  }
}

void ProgramFolder::begin(const std::string& text) {
  auto& programs = (*run_)["programs"];
  programs.push_back(nlohmann::ordered_json::object());
  write(fmt::format("{}_{}.mlir", ::getpid(), programs.size()), text);
}

void ProgramFolder::end(const std::optional<pjrt::CompiledProgram>& program) {
  auto& programs = (*run_)["programs"];
  compiled_.push_back(programs.size() - 1);
  if (program) programs.back() = pjrt::figures_of(*program);
}

void ProgramFolder::note(const Metrics& metrics) {
  if (std::chrono::steady_clock::now() - written_ > std::chrono::seconds(1)) finish(metrics);
}

void ProgramFolder::finish(const Metrics& metrics) {
  auto& run = *run_;
  run["fallbacks"] = metrics.fallbacks;
  run["host_reads"] = metrics.host_reads;
  for (size_t i = 0; i < compiled_.size(); i++) {
    auto& program = run["programs"][compiled_[i]];
    const auto& counted = metrics.programs[i];
    program["operators"] = counted.operations;
    program["seconds"] = counted.seconds;
    program["from_disk"] = counted.from_disk;
    program["executions"] = counted.executions;
    program["has_backward"] = counted.has_backward;
  }
  write(fmt::format("{}.json", ::getpid()), run.dump(2) + "\n");
  written_ = std::chrono::steady_clock::now();
}

}  // namespace tessera::xla
