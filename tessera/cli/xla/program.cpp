#include "tessera/cli/xla/program.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/process.h"
#include "tessera/base/words.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kVariable = "TESSERA_XLA_PROGRAMS";

struct ProgramFlags {
  int64_t number = 0, seconds = 0;
  bool as_json = false, as_text = false;
};

/// Returns {4711, 2} for "4711_2.mlir".
std::optional<std::pair<int64_t, int64_t>> process_and_number(std::string_view name) {
  constexpr std::string_view kEnding = ".mlir";
  const auto middle = name.find('_');
  if (middle == std::string_view::npos || !name.ends_with(kEnding)) return {};
  name.remove_suffix(kEnding.size());
  const auto process = number_of<int64_t>(name.substr(0, middle)), number = number_of<int64_t>(name.substr(middle + 1));
  return process && number ? std::optional(std::pair(*process, *number)) : std::nullopt;
}

Json parsed(const std::filesystem::path& file) {
  try {
    return Json::parse(InputFile(file).read_all());
  } catch (const Json::exception& error) {
    throw Error("{} is not what a run leaves in {}: {}", file, kVariable, error.what());
  }
}

std::vector<Json> programs_of(const Json& runs) {
  std::vector<Json> all;
  for (const auto& run : runs) all.insert(all.end(), run.at("programs").begin(), run.at("programs").end());
  return all;
}

/// Prints the text of the program with this number or, if that is 0, of the program that has run most often, which is the training step.
void print_text(const std::vector<Json>& programs, int64_t number) {
  if (number > std::ssize(programs)) throw Error("there is no program {}, only {}", number, counted(std::ssize(programs), "program"));
  const auto executions = [](const Json& program) { return program.value("executions", int64_t{0}); };
  const auto& chosen = number > 0 ? programs[static_cast<size_t>(number - 1)] : *std::ranges::max_element(programs, {}, executions);
  fmt::print("{}", InputFile(chosen.at("file").get<std::string>()).read_all());
}

void print_programs(const Json& runs, bool with_files) {
  int64_t number = 0;
  for (const auto& run : runs) {
    fmt::print("{}process    {}{}\n", number > 0 ? "\n" : "", run.at("process").get<int64_t>(),
               run.contains("platform")
                   ? fmt::format(", {} of {}", counted(run.at("replicas").get<int64_t>(), "replica"), run.at("platform").get<std::string>())
                   : "");
    print_cuts(run);
    for (const auto& program : run.at("programs")) {
      const bool is_known = program.contains("executions");
      fmt::print("\nprogram    {}: {}\n", ++number,
                 is_known ? fmt::format("{}, {} in {:.2f} s, run {}", counted(program.at("operators").get<int64_t>(), "operation"),
                                        program.at("from_disk").get<bool>() ? "loaded" : "compiled", program.at("seconds").get<double>(),
                                        counted(program.at("executions").get<int64_t>(), "time"))
                          : "not compiled to the end");
      if (is_known) print_figures(program);
      if (with_files) fmt::print("text       {}\n", program.at("file").get<std::string>());
    }
  }
}

void show(const std::filesystem::path& folder, const ProgramFlags& flags, bool with_files, const std::string& otherwise) {
  const auto runs = runs_in(folder);
  const auto programs = programs_of(runs);
  if (programs.empty()) throw Error(otherwise);
  if (flags.as_text) return print_text(programs, flags.number);
  flags.as_json ? fmt::print("{}\n", Json{{"processes", runs}}.dump(2)) : print_programs(runs, with_files);
}

/// Runs the command to its end, or for --seconds, and shows the programs that it has compiled. The command's output goes to standard error.
int run(const std::vector<std::string>& command, const ProgramFlags& flags) {
  const auto named = env(kVariable);
  const auto own = named ? nullptr : std::make_unique<TemporaryFolder>("tessera-programs");
  const auto folder = named ? std::filesystem::absolute(*named) : own->path();
  Process process(command, {{kVariable, folder.string()}}, Process::Output::Inherit, [] { ::dup2(STDERR_FILENO, STDOUT_FILENO); });
  ::signal(SIGINT, SIG_IGN);  // Ctrl-C is for the program
  auto ended = process.wait(flags.seconds > 0 ? std::chrono::seconds(flags.seconds) : std::chrono::hours(24 * 365));
  const bool was_long_enough = !ended;
  if (was_long_enough) {
    ::kill(process.pid(), SIGTERM);
    ended = process.wait(std::chrono::seconds(10));
  }
  show(folder, flags, named.has_value(),
       fmt::format("{} has compiled no program for an XLA device; its status is {}", command.front(), ended.value_or(128 + SIGKILL)));
  return was_long_enough ? 0 : *ended;
}

}  // namespace

Json runs_in(const std::filesystem::path& folder) {
  std::map<std::pair<int64_t, int64_t>, std::string> texts;
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    if (const auto which = process_and_number(name)) texts[*which] = name;
  }
  Json runs = Json::array();
  for (const auto& [which, name] : texts) {
    const auto& [process, number] = which;
    if (runs.empty() || runs.back().at("process") != process) {
      const auto file = folder / fmt::format("{}.json", process);
      runs.push_back(is_there(file) ? parsed(file) : Json{{"process", process}, {"programs", Json::array()}});
    }
    auto& programs = runs.back().at("programs");
    while (std::ssize(programs) < number) programs.push_back(Json::object());  // the compiler of this program has not finished
    programs[static_cast<size_t>(number - 1)]["file"] = (folder / name).string();
  }
  return runs;
}

void print_cuts(const Json& run) {
  for (const auto& [what, key] : {std::pair("on the CPU", "fallbacks"), std::pair("cut by", "host_reads")}) {
    const auto counts = run.value(key, Json::object());
    for (const auto& [name, times] : counts.items()) fmt::print("{:<10} {}, {}\n", what, name, counted(times.get<int64_t>(), "time"));
  }
}

void print_figures(const Json& figures) {
  if (!figures.contains("memory")) return;  // the program was traced, but not compiled
  const auto& memory = figures.at("memory");
  const auto bytes = [&](const char* name) { return size_text(memory.at(name).get<double>()); };
  fmt::print("memory     {} arguments, {} outputs, {} of them in the place of arguments, {} temporary, {} code\n", bytes("arguments"),
             bytes("outputs"), bytes("aliased"), bytes("temporary"), bytes("code"));
  if (memory.at("peak") != 0) fmt::print("peak       {}\n", bytes("peak"));
  const auto& cost = figures.at("cost");
  if (cost.contains("flops")) fmt::print("flops      {:.4g}\n", cost.at("flops").get<double>());
  if (cost.contains("bytes accessed")) fmt::print("accesses   {} of memory\n", size_text(cost.at("bytes accessed").get<double>()));
  const auto collectives = figures.value("collectives", Json::object());
  for (const auto& [name, all] : collectives.items()) {
    fmt::print("{:<10} {}, {}\n", name, all.at("count").get<int>(), size_text(all.at("bytes").get<double>()));
  }
}

void add_xla_program_command(CLI::App& xla, std::function<int()>& chosen) {
  auto* command = xla.add_subcommand("program", "Shows the programs that a run has compiled, and what they need");
  command->formatter(std::make_shared<HelpWithUsage>("tessera xla program [FLAGS] FOLDER, or PROGRAM ARGS..."));
  const auto flags = std::make_shared<ProgramFlags>();
  auto* text =
      command->add_flag("--text", flags->as_text, "Print the StableHLO module of one program: of --number, or the training step, which has run most often");
  command->add_option("--number", flags->number, "The program with this number in the list")
      ->type_name("N")
      ->check(from_to(1, 1'000'000'000))
      ->needs(text);
  command->add_option("--seconds", flags->seconds, "End the program after this time; it runs to its end unless given")
      ->type_name("S")
      ->check(from_to(1, 10'000'000));
  command->add_flag("--json", flags->as_json, "As JSON")->excludes(text);
  command->prefix_command();
  command->footer(
      Help::footer_of({"tessera xla program ./train --epochs 1", "tessera xla program --text --seconds 60 ./train >step.mlir",
                       "TESSERA_XLA_PROGRAMS=programs ./train; tessera xla program programs"},
                      "Runs PROGRAM, whose output goes to standard error; Ctrl-C ends PROGRAM, not this command. FOLDER is where an "
                      "earlier run with TESSERA_XLA_PROGRAMS=FOLDER has left its programs; name a new folder for each run. "
                      "tessera xla compile takes the text that --text prints."));
  command->callback([&chosen, command, flags] {
    const auto words = command->remaining();
    if (words.empty()) throw ConfigError("xla program needs a FOLDER with programs, or a PROGRAM to run; see tessera xla program --help");
    const bool is_folder = std::filesystem::is_directory(words.front());
    if (is_folder && words.size() > 1) throw ConfigError("'{}' comes after the folder {}; flags come before it", words[1], words[0]);
    chosen = [words, flags, is_folder] {
      if (!is_folder) return run(words, *flags);
      show(words.front(), *flags, true,
           fmt::format("{} has no programs; a run leaves them there if {} names it", words.front(), kVariable));
      return 0;
    };
  });
}

}  // namespace tessera::cli
