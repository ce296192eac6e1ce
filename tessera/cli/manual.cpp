// `tessera manual`: writes a man page for each command, made from the text of its --help.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"

namespace tessera::cli {
namespace {

/// Returns the text as troff takes it: with dashes that can be copied, and without lines that would be requests.
std::string for_troff(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if ((c == '.' || c == '\'') && (result.empty() || result.back() == '\n')) result += "\\&";
    result += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  }
  return result;
}

std::string upper_case(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return text;
}

/// Returns paragraphs. Lines that begin with a space stay as they are, and lines such as "Examples:" become headings.
std::string paragraphs_of_manual(const std::string& text) {
  std::string result;
  std::istringstream all(text);
  for (std::string line; std::getline(all, line);) {
    if (line.empty()) {
      result += ".PP\n";
    } else if (line.starts_with(' ')) {
      result += ".br\n" + for_troff(line) + "\n";
    } else if (line.ends_with(':') && line.find(' ') == std::string::npos) {
      line.pop_back();
      result += ".SH " + upper_case(line) + "\n";
    } else {
      result += for_troff(line) + "\n";
    }
  }
  return result;
}

std::string item_of_manual(const std::string& name, const std::string& text) {
  return ".TP\n\\fB" + for_troff(name) + "\\fR\n" + for_troff(text) + "\n";
}

/// Returns the line behind "Usage: " of the command's help.
std::string usage_of(const CLI::App& app, const std::string& above) {
  const auto help = app.get_formatter()->make_help(&app, above + app.get_name(), CLI::AppFormatMode::Normal);
  const std::string word = "Usage: ";
  const auto begin = help.find(word) + word.size();
  return help.substr(begin, help.find('\n', begin) - begin);
}

std::vector<const CLI::App*> listed_commands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* one) { return !one->get_group().empty(); });
}

/// Returns the page of a command. `above` are the commands above it, such as "tessera ckpt ".
std::string manual_page(const CLI::App& app, const std::string& above, const std::string& version) {
  const auto path = above + app.get_name();
  const auto name = CLI::detail::find_and_replace(path, " ", "-");
  const auto first = app.get_description().substr(0, app.get_description().find(". "));
  auto page = fmt::format(".TH {} 1 \"\" \"Tessera {}\" \"Tessera\"\n.SH NAME\n{} \\- {}\n", upper_case(name), version,
                          for_troff(name), for_troff(first));
  page += fmt::format(".SH SYNOPSIS\n{}\n.SH DESCRIPTION\n{}", for_troff(usage_of(app, above)), paragraphs_of_manual(app.get_description() + "\n"));
  for (const auto& group : app.get_groups()) {
    const auto flags = app.get_options([&](const CLI::Option* one) { return one->nonpositional() && !group.empty() && one->get_group() == group; });
    if (!flags.empty()) page += fmt::format(".SH \"{}\"\n", upper_case(group));
    for (const auto* flag : flags) page += item_of_manual(Help::names_of(*flag) + Help::value_of(*flag), Help::explanation_of(*flag));
  }
  const auto commands = listed_commands(app);
  if (!commands.empty()) page += ".SH COMMANDS\n";
  for (const auto* command : commands) page += item_of_manual(command->get_name(), command->get_description());
  page += ".PP\n" + paragraphs_of_manual(app.get_footer() + "\n");
  std::string others = above.empty() ? "" : CLI::detail::trim_copy(above);
  for (const auto* command : commands) others += (others.empty() ? "" : ", ") + path + " " + command->get_name();
  if (!others.empty()) {
    others = CLI::detail::find_and_replace(CLI::detail::find_and_replace(others, ", ", "(1),\n"), " ", "-");
    page += ".SH \"SEE ALSO\"\n" + for_troff(others) + "(1)\n";
  }
  return page;
}

void write_manual(const CLI::App& app, const std::string& above, const std::string& version, const std::filesystem::path& folder) {
  const auto path = above + app.get_name();
  const auto file = folder / (CLI::detail::find_and_replace(path, " ", "-") + ".1");
  std::ofstream page(file);
  page << manual_page(app, above, version);
  page.close();
  if (!page) throw IoError("{} can't be written", file.string());
  for (const auto* command : listed_commands(app)) write_manual(*command, path + " ", version, folder);
}

}  // namespace

void add_manual_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("manual", "Writes the man pages of all commands");
  command->group("");
  const auto folder = std::make_shared<std::string>();
  command->add_option("FOLDER", *folder, "Where to write them")->required();
  command->footer(Help::footer_of({"tessera manual share/man/man1"}));
  command->callback([&app, &chosen, folder] {
    chosen = [&app, folder] {
      std::error_code failed;
      std::filesystem::create_directories(*folder, failed);
      if (failed) throw IoError("{} can't be made: {}", *folder, failed.message());
      write_manual(app, "", app.version(), *folder);
      return 0;
    };
  });
}

}  // namespace tessera::cli
