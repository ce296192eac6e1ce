// `tessera report`: makes a page of what a recorded run has left in its folder.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "tessera/base/atomic_write.h"
#include "tessera/base/words.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"
#include "tessera/cli/report/analysis.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli {

extern const char* const kReportPage;  // page.html

namespace {

using nlohmann::json;

struct ReportCommand {
  std::vector<std::string> runs;
  std::string out;
  bool as_json = false;

  int run() const {
    json data = {{"format", 1}, {"runs", json::array()}};
    std::string said;
    for (const auto& folder : runs) {
      const auto run = reports::read_run(folder);
      data["runs"].push_back(reports::data_of(run));
      if (as_json) continue;
      said += summary_of(data["runs"].back());
      if (const auto trace = reports::write_merged_trace(run)) said += fmt::format("trace  {} (opens at ui.perfetto.dev)\n", trace->string());
    }
    auto text = data.dump(as_json ? 1 : -1, ' ', false, json::error_handler_t::replace);
    const auto folder = std::filesystem::path(runs.front());
    if (as_json && out.empty()) return fmt::print("{}\n", text), 0;
    const auto file = out.empty() ? folder / (runs.size() > 1 ? "comparison.html" : "report.html") : std::filesystem::path(out);
    write_text(file, as_json ? text + "\n" : page_with(std::move(text)));
    fmt::print("{}{}   {}\n", said, as_json ? "data" : "page", file.string());
    return 0;
  }

  /// Puts the data into the page. Text of it can't end the script that holds it.
  static std::string page_with(std::string data) {
    std::string page = kReportPage;
    constexpr std::string_view kPlace = "{{DATA}}";
    return page.replace(page.find(kPlace), kPlace.size(), CLI::detail::find_and_replace(std::move(data), "<", "\\u003c"));
  }

  static std::string summary_of(const json& run) {
    const auto& facts = run["facts"];
    const auto step = run["step_seconds"].get<double>(), mfu = run["mfu"].get<double>();
    auto text =
        fmt::format("{}: {} on {}, {}, {} steps", run["folder"].get<std::string>(), facts.value("program", "a program"),
                    counted(facts["world"].get<int>(), "rank"), facts.value("status", "of unknown status"), run["steps"].get<int64_t>());
    if (step > 0) text += fmt::format(", {:.3g} s a step", step);
    if (mfu > 0) text += fmt::format(", MFU {:.0f} %", mfu * 100);
    if (const auto bytes = run["peak_memory"]["bytes"].get<double>(); bytes > 0)
      text += fmt::format(", at most {} (rank {})", train::short_bytes(bytes), run["peak_memory"]["rank"].get<int>());
    text += '\n';
    for (const auto& each : run["notes"]) text += fmt::format("note: {}\n", each.get<std::string>());
    for (const auto& each : run["advice"]) {
      text += fmt::format("\n{}\n  {}\n  {}\n\n", each["title"].get<std::string>(), each["evidence"].get<std::string>(),
                          CLI::detail::find_and_replace(each["remedy"].get<std::string>(), "\n", "\n  "));
    }
    if (run["advice"].empty() && step > 0) text += "nothing to advise\n";
    return printable(text, "\n");
  }
};

}  // namespace

void add_report_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("report", "Makes a page and a trace of runs that launch --record has recorded, with advice");
  const auto options = std::make_shared<ReportCommand>();
  command->add_option("RUN", options->runs, "The folder of a run; several are compared")->required();
  command->add_flag("--json", options->as_json, "Print the data that the page shows, as JSON, and write nothing else");
  command->add_option("--out", options->out, "Where to write; RUN/report.html, or RUN/comparison.html of several runs, unless given")
      ->type_name("FILE");
  command->footer(Help::footer_of({"tessera launch -n 4 --record run ./train", "tessera report run",
                                   "tessera report run other-run --out compared.html", "tessera report run --json >run.json"}));
  command->callback([&chosen, options] { chosen = [=] { return options->run(); }; });
}

}  // namespace tessera::cli
