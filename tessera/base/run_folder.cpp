#include "tessera/base/run_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/clock.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/file_lock.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kRunFile = "run.json";

std::filesystem::path lines_file(const std::filesystem::path& folder, int rank) {
  return folder / fmt::format("rank-{}.jsonl", rank);
}

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

json run_to_continue(const std::filesystem::path& folder, std::optional<int> world, int restarts) {
  auto run = read_run(folder);
  if (run.is_null() || restarts > 0) return run;
  if (run.value("status", json()) == "done") {
    throw ConfigError(
        "the folder {} has the record of a run that has finished; record this run in another folder. Only a run that has failed or was "
        "interrupted is continued in its folder",
        folder);
  }
  if (const auto before = run.value("world", json()); world && before.is_number() && before != *world) {
    throw ConfigError(
        "the folder {} has the record of a run on {} ranks, which can't be continued on {}; record this run in another folder, or start it "
        "on {} ranks",
        folder, before.dump(), *world, before.dump());
  }
  return run;
}

int attempts_in(const json& run) {
  return run.is_null() ? 0 : 1 + static_cast<int>(run.value("earlier", json::array()).size());
}

Fd open_lines(const std::filesystem::path& folder, int rank) {
  const auto path = lines_file(folder, rank);
  auto [file, state] = open_locked(path, O_WRONLY | O_APPEND);
  if (!file) throw IoError("{}", why_not_opened(path, errno));
  if (state == LockedFile::State::Held) {
    throw ConfigError("another job is recording its run in {} now; wait for its end, or record this run in another folder", folder);
  }
  return std::move(file);
}

bool is_recorded(const std::filesystem::path& folder) {
  const Fd file(::open(lines_file(folder, 0).c_str(), O_RDONLY | O_CLOEXEC));
  struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0, .l_pid = 0};
  return file && ::fcntl(file.get(), F_OFD_GETLK, &whole) == 0 && whole.l_type != F_UNLCK;
}

void write_run(const std::filesystem::path& folder, const json& run) {
  write_text(folder / kRunFile, run.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
}

void end_run(const std::filesystem::path& folder, const char* status, const std::string& cause) {
  auto run = read_run(folder);
  if (run.is_null()) return;
  run["status"] = status;
  if (!cause.empty()) run["cause"] = cause;
  if (run["ended"].is_null()) run["ended"] = unix_now();
  write_run(folder, run);
}

}  // namespace tessera
