// Help: the text of --help, in lines of at most 80 columns, with the defaults of flags. On a terminal, headings are bold.
#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/base/env.h"

namespace tessera::cli {

class Help : public CLI::Formatter {
 public:
  static constexpr const char* kExitStatus = "Exit status: 0 if all went well, 1 if it failed, 2 if the command line is wrong.";

  Help() { label("SUBCOMMAND", "COMMAND"); }

  /// Returns the end of a command's help: examples, further text, and the exit statuses.
  static std::string footer_of(const std::vector<std::string>& examples, const std::string& more = {}) {
    std::string text = examples.empty() ? "" : "Examples:\n";
    for (const auto& example : examples) text += "  " + example + "\n";
    return text + (examples.empty() ? "" : "\n") + (more.empty() ? "" : more + "\n\n") + kExitStatus;
  }

  /// Returns "-n, --nproc-per-node".
  static std::string names_of(const CLI::Option& option) { return CLI::detail::find_and_replace(option.get_name(false, true), ",", ", "); }

  /// Returns " INT", or " {shm,gloo}" where CLI11 has "TEXT:{shm,gloo}".
  static std::string value_of(const CLI::Option& option) {
    const auto type = option.get_type_size() == 0 ? std::string() : option.get_type_name();
    const auto colon = type.find(':');
    const bool has_choices = colon != std::string::npos && type[colon + 1] == '{';
    return type.empty() ? type : " " + (has_choices ? type.substr(colon + 1) : type.substr(0, colon));
  }

  /// Returns the description of a flag with its default, and with the flags that it needs.
  static std::string explanation_of(const CLI::Option& option) {
    auto text = option.get_description();
    if (!option.get_default_str().empty()) text += " (" + option.get_default_str() + " unless given)";
    if (option.get_required()) text += " (required)";
    for (const auto* other : option.get_needs()) text += " (needs " + other->get_name() + ")";
    return text;
  }

  // Joins the parts itself, because versions of CLI11 put empty lines at different places.
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    auto text = make_description(app) + make_usage(app, std::move(name)) + make_groups(app, mode) + make_subcommands(app, mode) + "\n" +
                make_footer(app);
    text = CLI::detail::find_and_replace(text, "\n\n\n", "\n\n");
    return has_colour() ? with_bold_headings(text) : text;
  }

  /// Whether standard output is a terminal that can show colours, and the user did not refuse them (no-color.org).
  static bool has_colour() { return ::isatty(STDOUT_FILENO) != 0 && env("TERM").value_or("dumb") != "dumb" && !env("NO_COLOR"); }

 protected:
  std::string make_description(const CLI::App* app) const override { return lines("", app->get_description(), 0); }
  std::string make_footer(const CLI::App* app) const override { return lines("", app->get_footer(), 0); }
  std::string make_subcommand(const CLI::App* command) const override {
    size_t widest = 0;
    for (const auto* each : command->get_parent()->get_subcommands({})) widest = std::max(widest, each->get_name().size());
    return lines("  " + command->get_name(), command->get_description(), widest + 4);
  }
  std::string make_option(const CLI::Option* option, bool) const override {
    const auto left = "  " + names_of(*option) + value_of(*option), text = explanation_of(*option);
    if (left.size() <= kWidth) return lines(left, text, kIndent);
    // Choices that are too long for the left column go above the description.
    return lines("  " + names_of(*option), CLI::detail::find_and_replace(value_of(*option).substr(1), ",", ", ") + '\n' + text, kIndent);
  }

 private:
  static constexpr size_t kWidth = 80, kIndent = 27;

  /// Makes headings such as "Options:" bold, and the first word of a usage line.
  static std::string with_bold_headings(const std::string& text) {
    std::string result;
    std::istringstream all(text);
    for (std::string line; std::getline(all, line);) {
      const auto end = line.find(':');
      const bool is_heading = end != std::string::npos && line.find(' ') > end && (end + 1 == line.size() || line.starts_with("Usage:"));
      result += is_heading ? "\033[1m" + line.substr(0, end + 1) + "\033[0m" + line.substr(end + 1) : line;
      result += '\n';
    }
    return result;
  }

  /// Wraps the text in a column that begins at `indent`, to the right of `left` or below it. Lines that begin with a space stay as they are.
  static std::string lines(const std::string& left, const std::string& text, size_t indent) {
    std::string result, line = left;
    const auto end_line = [&] {
      if (!line.empty()) result += line + '\n';
      line.clear();
    };
    if (line.size() >= indent) end_line();
    std::istringstream paragraphs(text);
    for (std::string paragraph; std::getline(paragraphs, paragraph); end_line()) {
      if (paragraph.empty()) result += '\n';
      if (paragraph.starts_with(' ')) {
        line = paragraph;
        continue;
      }
      std::istringstream words(paragraph);
      for (std::string word; words >> word;) {
        if (line.size() > indent && line.size() + 1 + word.size() > kWidth) end_line();
        line += line.size() < indent ? std::string(indent - line.size(), ' ') : line.size() == indent ? "" : " ";
        line += word;
      }
    }
    end_line();
    return result;
  }
};

/// The help of a command that takes a program and the program's arguments. CLI11's usage line would show neither, because they are not
/// options of the command.
class HelpWithUsage : public Help {
 public:
  explicit HelpWithUsage(std::string usage) : usage_(std::move(usage)) {}
  std::string make_usage(const CLI::App*, std::string) const override { return "Usage: " + usage_ + "\n"; }

 private:
  std::string usage_;
};

}  // namespace tessera::cli
