// `tessera top`: shows a recorded run while it runs.
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/config/raw_terminal.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/top_frame.h"

namespace tessera::cli {
namespace {

constexpr std::chrono::seconds kTopPatience(60), kTopEvery(1);

double unix_time_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

reports::TopView view_of_terminal() {
  using reports::Colours;
  reports::TopView view{.glyphs = train::glyphs_of_locale(), .colours = Help::has_colour(STDOUT_FILENO) ? Colours::On : Colours::Off};
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    view.columns = size.ws_col;
    view.rows = size.ws_row;
  }
  return view;
}

/// The present frame, or why there is none: files change while they are read.
std::string frame_of(const std::filesystem::path& folder, const reports::TopView& view) try {
  return reports::top_frame(reports::read_run(folder, reports::Extent::Ends), unix_time_now(), view);
} catch (const std::exception& error) {
  return printable(error.what()) + "\n";
}

/// Writes at once, so that a terminal never shows half a frame.
void put_out(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  expect_printed();
}

/// The frame as the terminal's whole content. Lines are overwritten, and not cleared first, so that nothing flickers.
void draw_frame(const std::string& frame) {
  std::string text = "\033[H";
  for (const char c : frame) text += c == '\n' ? "\033[K\n" : std::string(1, c);
  put_out(text + "\033[J");
}

void wait_for_run(const std::filesystem::path& folder) {
  if (is_there(folder / "run.json")) return;
  fmt::print("waiting for {} for {} seconds\n", (folder / "run.json").string(), kTopPatience.count());
  expect_printed();
  for (const auto end = std::chrono::steady_clock::now() + kTopPatience; std::chrono::steady_clock::now() < end;) {
    if (is_there(folder / "run.json")) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

int watch(const std::filesystem::path& folder) {
  wait_for_run(folder);
  reports::read_run(folder, reports::Extent::Ends);  // throws if there is no run
  const RawTerminal terminal;
  auto view = view_of_terminal();
  // What the terminal shows now moves up, where it can be read later.
  put_out(std::string(static_cast<size_t>(view.rows), '\n') + "\033[?25l");
  for (auto next = std::chrono::steady_clock::now();;) {
    const auto before = std::exchange(view, view_of_terminal());
    const auto now = std::chrono::steady_clock::now();
    if (now >= next || before.columns != view.columns || before.rows != view.rows) {
      draw_frame(frame_of(folder, view));
      next = now + kTopEvery;
    }
    pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
    if (::poll(&input, 1, 200) <= 0) continue;
    const auto key = terminal.read_key();
    if (!key || *key == 'q' || *key == RawTerminal::kInterrupt) return 0;
  }
}

}  // namespace

void add_top_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command =
      app.add_subcommand("top", "Shows a run that is recorded, while it runs: its loss, its ranks, and who is late. The key q ends it");
  struct Flags {
    std::filesystem::path run;
    bool once = false;
  };
  const auto flags = std::make_shared<Flags>();
  command->add_option("run", flags->run, "The folder that tessera launch --record has been given")->required()->type_name("RUN");
  command->add_flag("--once", flags->once, "Print the present state once, and end, as without a terminal");
  command->footer(Help::footer_of({"tessera top run/1", "tessera top --once run/1"},
                                  "A rank is marked with ! if it has not been heard of for 10 s, if it is behind, or if it computes for "
                                  "longer while the others wait. If there are more ranks than lines, these are the first."));
  command->callback([&chosen, flags] {
    chosen = [flags] {
      if (!flags->once && ::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0) return watch(flags->run);
      put_out(reports::top_frame(reports::read_run(flags->run, reports::Extent::Ends), unix_time_now(), view_of_terminal()));
      return 0;
    };
  });
}

}  // namespace tessera::cli
