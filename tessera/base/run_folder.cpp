#include "tessera/base/run_folder.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/atomic_write.h"
#include "tessera/base/clock.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kRunFile = "run.json";

}  // namespace

std::optional<std::filesystem::path> run_folder() {
  const auto folder = env(kRunVariable);
  if (!folder) return std::nullopt;
  if (object_path(*folder))
    throw ConfigError("{}={}: a run can't be recorded in an object store; name a folder of a file system", kRunVariable, *folder);
  return std::filesystem::absolute(*folder);
}

json read_run(const std::filesystem::path& folder) {
  const auto path = folder / kRunFile;
  if (!is_there(path)) return nullptr;
  std::ifstream file(path);
  auto run = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!run.is_object() || !run.contains("started") || !run["started"].is_number())
    throw ConfigError("{} is not the file of a run; record the run in another folder", path);
  return run;
}

json run_to_continue(const std::filesystem::path& folder, int restarts) {
  auto run = read_run(folder);
  if (run.is_null() || restarts > 0 || run.value("status", "") != "done") return run;
  throw ConfigError(
      "the folder {} has the record of a run that has finished; record this run in another folder. Only a run that has failed or was "
      "interrupted is continued in its folder",
      folder);
}

void write_run(const std::filesystem::path& folder, const json& run) {
  write_text(folder / kRunFile, run.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
}

void end_run(const std::filesystem::path& folder, int status) {
  auto run = read_run(folder);
  if (run.is_null() || (status == 0 && run.value("status", "") != "runs")) return;
  run["status"] = status == 0 ? "done" : "failed";
  if (run["ended"].is_null()) run["ended"] = unix_now();
  write_run(folder, run);
}

}  // namespace tessera
