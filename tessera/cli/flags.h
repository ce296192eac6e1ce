// The command line of a program, over CLI11: flags with dashes or underscores, errors that name the nearest flag, exit statuses. A header
// of its own, because only programs need CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/error_record.h"
#include "tessera/base/words.h"
#include "tessera/cli/help.h"

namespace tessera::cli {

// Exit statuses, beside those that a program gives by itself.
inline constexpr int kFailed = 1, kWrongUsage = 2;

/// "tessera ckpt verify --help"
inline std::string help_command(const CLI::App& command) {
  std::string text = "--help";
  for (const auto* app = &command; app != nullptr; app = app->get_parent()) text = app->get_name() + " " + text;
  return text;
}

/// The error that a command has no flag like the one at `place`, with the value that follows it.
inline ConfigError no_such_flag(const CLI::App& command, const std::vector<std::string>& arguments, size_t place) {
  std::vector<std::string> known;
  for (const auto* flag : command.get_options()) {
    for (const auto& name : flag->get_lnames()) known.push_back("--" + name);
  }
  auto shown = arguments[place];
  const auto nearest = nearest_name(shown.substr(0, shown.find('=')), known, "--");
  const bool has_value = !nearest.empty() && command.get_option_no_throw(nearest)->get_items_expected_min() > 0;
  if (has_value && shown.find('=') == std::string::npos && place + 1 < arguments.size()) shown += " " + arguments[place + 1];
  auto text = "there is no flag '" + shown + "'";
  if (!nearest.empty()) text += " (did you mean " + nearest + "?)";
  if (command.get_prefix_command()) text += "; flags of " + command.get_name() + " come before the program, those of the program after it";
  return ConfigError(text + "; " + help_command(command) + " lists all");
}

inline ConfigError no_such_command(const CLI::App& command, const std::string& given) {
  std::vector<std::string> known;
  for (const auto* each : command.get_subcommands([](const CLI::App*) { return true; })) known.push_back(each->get_name());
  if (known.empty()) return ConfigError("'" + given + "' belongs to no flag; " + help_command(command) + " lists them");
  auto text = given.empty() ? "a command is missing" : "there is no command '" + given + "'";
  const auto nearest = nearest_name(given, known);
  if (!nearest.empty()) text += " (did you mean " + nearest + "?)";
  return ConfigError(text + "; choose one of " + CLI::detail::join(known, ", "));
}

/// The arguments with dashes in place of the underscores in flags. Throws ConfigError for what no command knows: CLI11 would first complain
/// of what is required.
inline std::vector<std::string> known_arguments(const CLI::App& app, std::vector<std::string> arguments) {
  const auto* command = &app;
  bool has_flags = false;
  size_t places = 0;  // arguments that belong to no flag, so far
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& argument = arguments[i];
    if (argument.size() > 1 && argument.front() == '-' && argument != "--") {
      const auto end = argument[1] == '-' ? std::min(argument.find('='), argument.size()) : 2;
      auto name = argument.substr(0, end);
      std::ranges::replace(name, '_', '-');
      const auto* flag = command->get_option_no_throw(name);
      // "-n2" is a flag with its value; "-np" is what others call it.
      const bool is_word = argument[1] != '-' && argument.size() > 2 && std::isdigit(static_cast<unsigned char>(argument[2])) == 0;
      if (flag == nullptr || is_word) throw no_such_flag(*command, arguments, i);
      argument.replace(0, end, name);
      has_flags = true;
      const bool needs_value = flag->get_items_expected_min() > 0 && argument.size() == end;
      if (needs_value && ++i == arguments.size()) throw ConfigError(name + " needs a value; see " + help_command(*command));
      if (arguments[i].empty() || arguments[i] == name + "=") throw ConfigError("the value of " + name + " is empty");
    } else if (command->get_prefix_command()) {  // a program, whose arguments are its own
      if (argument == "--") arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i));
      return arguments;
    } else {
      const auto is_it = [&](const CLI::App* each) { return each->get_name() == argument; };
      const auto found = command->get_subcommands(is_it);
      const auto has_place = [](const CLI::Option* option) { return option->get_positional(); };
      if (found.empty() && places < command->get_options(has_place).size()) {
        places++;
        continue;
      }
      if (found.empty()) throw no_such_command(*command, argument);
      command = found.front();
      has_flags = false;
      places = 0;
    }
  }
  if (!has_flags && command->get_require_subcommand_min() > 0) throw no_such_command(*command, "");
  return arguments;
}

/// Throws if something that was printed did not reach standard output.
inline void expect_printed() {
  const int reason = std::fflush(stdout) == 0 ? 0 : errno;
  if (reason == 0 && std::ferror(stdout) == 0) return;
  throw IoError(std::string("standard output can't be written: ") + (reason == 0 ? "an earlier write failed" : std::strerror(reason)));
}

/// Reads the command line, which calls the callbacks of `app`. Returns whether the program shall run: not after --help.
inline bool read_flags(CLI::App& app, std::vector<std::string> arguments) try {
  arguments = known_arguments(app, std::move(arguments));
  std::ranges::reverse(arguments);  // the order that CLI11 takes
  app.parse(std::move(arguments));
  return true;
} catch (const CLI::Success& answer) {
  app.exit(answer);
  return false;
} catch (const CLI::ParseError& error) {
  const auto* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  throw ConfigError(std::string(error.what()) + "; see " + help_command(*command));
}

/// A program with a command line.
class Program : public CLI::App {
 public:
  Program(const std::string& description, const std::string& name) : CLI::App(description, name) {
    formatter(std::make_shared<Help>());
    footer(Help::kExitStatus);
    set_help_flag("-h,--help", "Print this help and exit");
  }

  /// Reads the command line and runs `body`. Returns the exit status. Errors are printed: those of callbacks are wrong usage.
  int run(int argc, char** argv, const std::function<int()>& body) {
    int status_of_error = kWrongUsage;
    try {
      const bool runs = read_flags(*this, {argv + 1, argv + argc});
      status_of_error = kFailed;
      const int status = runs ? body() : 0;
      if (status == 0) expect_printed();
      return status;
    } catch (const std::exception& error) {
      record_error(error.what());
      std::fprintf(stderr, "%s: %s\n", get_name().c_str(), printable(error.what(), "\n").c_str());
      return status_of_error;
    }
  }
};

}  // namespace tessera::cli
