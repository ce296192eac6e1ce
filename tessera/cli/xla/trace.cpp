#include "tessera/cli/xla/trace.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/process.h"
#include "tessera/base/words.h"
#include "tessera/cli/xla/program.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kRunsOfAStep = 3;  // after so many, the last part of a step that a read cuts has run twice

/// Returns the largest program with a backward pass that was traced more than once; nothing until such a program has been traced
/// kRunsOfAStep times or the run is over. A program that was traced once may be that of the first step, which also makes optimizer state
/// and starting values.
std::optional<TracedStep> step_in(const std::filesystem::path& folder, bool is_over) {
  const Json *largest = nullptr, *of = nullptr;
  int64_t most = 0;
  const auto runs = runs_in(folder);
  for (const auto& run : runs) {
    for (const auto& program : run.at("programs")) {
      if (!program.value("has_backward", false)) continue;
      const auto executions = program.value("executions", int64_t{0});
      most = std::max(most, executions);
      const auto operators = [](const Json& each) { return each.value("operators", int64_t{0}); };
      if (executions > 1 && (!largest || operators(program) > operators(*largest))) largest = &program, of = &run;
    }
  }
  if (!largest || (most < kRunsOfAStep && !is_over)) return std::nullopt;
  return TracedStep{
      .text = InputFile(largest->at("file").get<std::string>()).read_all(),
      .cuts = {{"fallbacks", of->value("fallbacks", Json::object())}, {"host_reads", of->value("host_reads", Json::object())}}};
}

}  // namespace

TracedStep traced_step(const std::vector<std::string>& command, int replicas, const std::string& plugin) {
  const TemporaryFolder place("tessera-programs");
  const auto said = place.path() / "said";
  const Fd output(::open(said.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (!output) throw IoError("{} can't be written", said);
  Process process(command,
                  {{"TESSERA_XLA_TRACE_ONLY", std::to_string(replicas)},
                   {"TESSERA_TRANSPORT", "xla"},
                   {"TESSERA_PJRT_PLUGIN", plugin},
                   {"TESSERA_STARTED_APART", ""},
                   {"TESSERA_XLA_PROGRAMS", place.path().string()}},
                  Process::Output::Inherit, [&] {
                    ::setpgid(0, 0);  // the command may be a script, whose children must be killed, too
                    ::dup2(output.get(), STDOUT_FILENO);
                    ::dup2(output.get(), STDERR_FILENO);
                  });
  const auto end = c10::make_scope_exit([&] { ::kill(-process.pid(), SIGKILL); });
  for (;;) {
    const auto status = process.wait(std::chrono::milliseconds(100));
    if (auto step = step_in(place.path(), status.has_value())) return *std::move(step);
    if (!status) continue;
    const auto words = InputFile(said).read_all();
    throw Error(
        "{} has ended with status {}, and no step with a backward pass was traced twice: the program has to train for three steps, over "
        "several epochs if need be, on the world that tessera::init or xla::init returns. It printed{}",
        command.front(), *status, words.empty() ? " nothing" : ":\n" + printable(words, "\n"));
  }
}

}  // namespace tessera::cli
