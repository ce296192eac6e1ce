#include "tessera/cli/models/plan_runs.h"

#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"

namespace tessera::cli {
namespace {

using PlanClock = std::chrono::steady_clock;

constexpr auto kRunLimit = std::chrono::minutes(10);
constexpr auto kRunPoll = std::chrono::milliseconds(5);

/// A child that runs, with the files for its outcome and for what it prints.
struct RunningPlan {
  size_t index;
  pid_t pid;
  std::filesystem::path out, said;
  PlanClock::time_point end = PlanClock::now() + kRunLimit;
};

[[noreturn]] void be_child(const PlannedRun& run, const RunningPlan& files) noexcept {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::setpgid(0, 0);  // the program may be a script, whose children must be killed, too
  const int said = ::open(files.said.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
  if (said < 0 || ::dup2(said, STDOUT_FILENO) < 0 || ::dup2(said, STDERR_FILENO) < 0) ::_exit(1);
  const auto set = [](const std::string& name, const std::string& value) { ::setenv(name.c_str(), value.c_str(), /*overwrite=*/1); };
  for (const auto* name : {"RANK", "WORLD_SIZE", "TESSERA_CONFIG_FILE"}) ::unsetenv(name);
  for (const auto& [name, value] : run.environment) set(name, value);
  set("TESSERA_DRY_RUN", fmt::format("{}/{}", run.world, run.ranks_per_host));
  set("TESSERA_DRY_RUN_OUT", files.out.string());
  try {
    run.body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", first_line(error).c_str());
  }
  std::fflush(nullptr);
  ::_exit(1);  // a dry run ends the process itself
}

PlannedOutcome outcome_of(const RunningPlan& run, int status, std::string_view how) {
  if (is_there(run.out)) {
    auto json = nlohmann::ordered_json::parse(InputFile(run.out).read_all(), nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.value("steps", 0) > 0 && status == 0) return {.json = std::move(json), .fault = {}};
    how = json.is_object() && status == 0 ? "it ended before it had taken a step of training" : how;
  }
  auto words = is_there(run.said) ? printable(InputFile(run.said).read_all(), "\n") : "";
  words.erase(words.find_last_not_of('\n') + 1);
  return {.json = {}, .fault = fmt::format("{}{}", how, words.empty() ? "; it printed nothing" : ": " + words)};
}

}  // namespace

std::vector<PlannedOutcome> planned_outcomes(const std::vector<PlannedRun>& runs, int at_once, const std::function<void(size_t)>& progress) {
  const TemporaryFolder folder("tessera-plan");
  std::vector<PlannedOutcome> outcomes(runs.size());
  std::vector<RunningPlan> running;
  const auto end_all = c10::make_scope_exit([&] {
    for (const auto& each : running) {
      ::kill(-each.pid, SIGKILL);
      ::waitpid(each.pid, nullptr, 0);
    }
  });
  for (size_t next = 0, ended = 0; ended < runs.size();) {
    for (; next < runs.size() && std::ssize(running) < at_once; next++) {
      RunningPlan one{.index = next, .pid = -1, .out = folder.path() / fmt::format("{}.json", next), .said = folder.path() / fmt::format("{}.txt", next)};
      std::fflush(nullptr);
      one.pid = ::fork();
      if (one.pid < 0) throw IoError("no process can be started for a dry run: {}", std::strerror(errno));
      if (one.pid == 0) be_child(runs[next], one);
      ::setpgid(one.pid, one.pid);  // whoever of both is first
      running.push_back(one);
    }
    std::this_thread::sleep_for(kRunPoll);
    std::erase_if(running, [&](const RunningPlan& each) {
      const bool is_late = PlanClock::now() > each.end;
      if (is_late) ::kill(-each.pid, SIGKILL);
      int status = 0;
      if (::waitpid(each.pid, &status, is_late ? 0 : WNOHANG) == 0) return false;
      const auto how = is_late ? fmt::format("it has taken no step within {} minutes", kRunLimit.count())
                       : WIFSIGNALED(status)
                           ? fmt::format("it was killed by signal {}", WTERMSIG(status))
                           : fmt::format("it ended with status {} and has taken no step of training with Tessera", WEXITSTATUS(status));
      outcomes[each.index] = outcome_of(each, status, how);
      progress(++ended);
      return true;
    });
  }
  return outcomes;
}

}  // namespace tessera::cli
