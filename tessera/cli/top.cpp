// `tessera top`: shows a recorded run while it runs.
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "tessera/base/clock.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/config/raw_terminal.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/top_frame.h"

namespace tessera::cli {
namespace {

reports::TopView view_of_terminal() {
  reports::TopView view{.glyphs = train::glyphs_of_locale()};
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    view.columns = size.ws_col;
    view.rows = size.ws_row;
  }
  return view;
}

reports::RecordedRun run_of(const std::filesystem::path& folder) {
  return reports::read_run(folder, reports::Extent::Ends);
}

/// Whether the run has ended. One that has failed may be started again, unless the launcher has noted the cause.
bool has_ended(const nlohmann::json& facts) {
  constexpr double kUntilRestart = 15;  // seconds
  const auto status = facts.value("status", "");
  if (status != "failed") return status == "done" || status == "interrupted";
  const auto ended = facts.value("ended", nlohmann::json());
  return facts.contains("cause") || (ended.is_number() && unix_now() - ended.get<double>() > kUntilRestart);
}

/// Writes at once, so that a terminal never shows half a frame.
void put_out(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  expect_printed();
}

int watch(const std::filesystem::path& folder) {
  run_of(folder);  // throws if the folder has no run
  const RawTerminal terminal;
  // The screen so far moves up, where it can be read later.
  put_out(std::string(static_cast<size_t>(view_of_terminal().rows), '\n') + "\033[?25l");
  while (true) {
    // Lines are overwritten, and not cleared first, so that nothing flickers.
    const auto run = run_of(folder);
    std::string text = "\033[H";
    for (const char c : reports::top_frame(run, unix_now(), view_of_terminal())) text += c == '\n' ? "\033[K\n" : std::string(1, c);
    put_out(text + "\033[J");
    if (has_ended(run.facts)) return 0;
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (::poll(&input, 1, 1000) <= 0) continue;
    const auto key = terminal.read_key();
    if (!key || *key == 'q' || *key == RawTerminal::kInterrupt) return 0;
  }
}

}  // namespace

void add_top_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command =
      app.add_subcommand("top", "Shows a run that is recorded, while it runs: its loss, its ranks, and who is late. The key q ends it");
  const auto run = std::make_shared<std::filesystem::path>();
  command->add_option("run", *run, "The folder that tessera launch --record has been given")->required()->type_name("RUN");
  command->footer(Help::footer_of({"tessera top run/1", "tessera top run/1 | cat"},
                                  "A rank is marked with ! if it has not been heard of for 10 s, if it is behind, or if it computes for "
                                  "longer while the others wait. If there are more ranks than lines, these are the first. Without a "
                                  "terminal, the present state is printed once."));
  command->callback([&chosen, run] {
    chosen = [run] {
      if (::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0) return watch(*run);
      put_out(reports::top_frame(run_of(*run), unix_now(), view_of_terminal()));
      return 0;
    };
  });
}

}  // namespace tessera::cli
