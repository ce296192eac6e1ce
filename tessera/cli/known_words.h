// Checks the words of a command line: refuses unknown flags and commands, suggests the nearest known ones, and checks values of flags.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::cli {

/// A function that returns why a command refuses a flag, or a word in the place of a command; empty if it knows no reason.
using Reasons = std::function<std::string(const CLI::App& command, const std::string& word)>;

/// For Option::check(): a number from `low` to `high`.
template <class T>
CLI::Validator from_to(T low, T high) {
  using Number = std::conditional_t<std::integral<T>, int64_t, double>;
  return CLI::Validator(
      [low = Number(low), high = Number(high)](const std::string& text) {
        const auto value = number_of<Number>(text);
        if (value && *value >= low && *value <= high) return std::string();
        return formatted("'{}' is not {} from {} to {}", text, std::integral<T> ? "a whole number" : "a number", low, high);
      },
      "");
}

/// For Option::check(): one of these words.
inline CLI::Validator one_of(const std::vector<std::string>& words) {
  return CLI::Validator(
      [words](const std::string& text) {
        if (std::ranges::find(words, text) != words.end()) return std::string();
        return "'" + text + "' is not one of " + CLI::detail::join(words, ", ");
      },
      "{" + CLI::detail::join(words, ",") + "}");
}

/// Returns a command line such as "tessera ckpt verify --help".
inline std::string help_command(const CLI::App& command) {
  std::string text = "--help";
  for (const auto* app = &command; app != nullptr; app = app->get_parent()) text = app->get_name() + " " + text;
  return text;
}

/// The flags by which Tessera's commands and other launchers say a number of ranks.
inline constexpr std::array<std::string_view, 10> kRankCounts = {"--nproc-per-node", "--world", "--ranks",  "--world-size", "--num-ranks",
                                                                 "--num-processes",  "--nproc", "--nprocs", "--np",         "-n"};

/// Returns the known flag that a person may have meant: -n for -np, --nproc-per-node for --nprocs, --max-restarts for --restarts, --world
/// for --ranks, --model for -model. Empty if none is near.
inline std::string nearest_flag(const std::string& given, const std::vector<std::string>& known) {
  const auto is_known = [&](std::string_view name) { return std::ranges::find(known, name) != known.end(); };
  const auto lower = given.substr(0, 1) + static_cast<char>(std::tolower(static_cast<unsigned char>(given[1])));
  if (!given.starts_with("--") && is_known("-" + given)) return "-" + given;
  if (!given.starts_with("--") && is_known(lower)) return lower;
  if (auto nearest = given.starts_with("--") ? nearest_name(given, known, "--") : std::string(); !nearest.empty()) return nearest;
  if (std::ranges::find(kRankCounts, given == "-np" ? "-n" : given) != kRankCounts.end()) {
    if (const auto* const same = std::ranges::find_if(kRankCounts, is_known); same != kRankCounts.end()) return std::string(*same);
  }
  const auto words_in = [](const std::string& name) {
    auto words = CLI::detail::split(name.substr(2), '-');
    for (auto& word : words) word = word.substr(0, word.size() - (word.size() > 2 && word.ends_with('s') ? 1 : 0));
    return words;
  };
  if (!given.starts_with("--")) return given.size() > 2 ? nearest_flag("-" + given, known) : std::string();
  const auto wanted = words_in(given);
  std::string best;
  for (const auto& name : known) {
    const auto words = name.starts_with("--") ? words_in(name) : std::vector<std::string>();
    const auto has = [&](const std::string& word) { return std::ranges::find(words, word) != words.end(); };
    // --notes-of-first-rank is about notes, so --first-rank does not mean it.
    const auto begin = words.begin(), of = std::ranges::find(words, "of");
    const bool is_about_it = std::any_of(begin, of, [&](const auto& word) { return std::ranges::find(wanted, word) != wanted.end(); });
    if (std::ranges::all_of(wanted, has) && is_about_it && (best.empty() || words.size() < words_in(best).size())) best = name;
  }
  return best;
}

/// Returns the error for an unknown flag.
inline ConfigError no_such_flag(const CLI::App& command, const std::string& given, const Reasons& reasons) {
  const auto shown = given.substr(0, given.find('='));
  auto name = shown;
  std::ranges::replace(name, '_', '-');
  if (const auto reason = reasons ? reasons(command, name) : std::string(); !reason.empty())
    return ConfigError(name + " is refused: " + reason);
  std::vector<std::string> known;
  for (const auto* flag : command.get_options([](const CLI::Option* one) { return !one->get_group().empty(); })) {
    for (const auto& each : flag->get_lnames()) known.push_back("--" + each);
    for (const auto& each : flag->get_snames()) known.push_back("-" + each);
  }
  const auto nearest = nearest_flag(name, known);
  auto text = "there is no flag '" + shown + "'";
  if (!nearest.empty()) text += " (did you mean " + nearest + "?)";
  if (command.get_prefix_command()) text += "; flags of " + command.get_name() + " come before the program, those of the program after it";
  return ConfigError(text + "; " + help_command(command) + " lists all");
}

inline ConfigError no_such_command(const CLI::App& command, const std::string& given, const Reasons& reasons) {
  std::vector<std::string> known;
  for (const auto* each : command.get_subcommands({})) known.push_back(each->get_name());
  const bool has_file = command.get_option_no_throw("--config-file") != nullptr && !given.empty();
  const auto file = has_file ? " (did you mean --config-file " + given + "?)" : "";
  if (known.empty()) return ConfigError("'" + given + "' belongs to no flag" + file + "; " + help_command(command) + " lists them");
  if (const auto reason = reasons ? reasons(command, given) : std::string(); !reason.empty())
    return ConfigError(given + " is refused: " + reason);
  auto text = given.empty() ? "a command is missing" : "there is no command '" + given + "'";
  auto nearest = nearest_name(given, known);
  for (const auto* each : command.get_subcommands({})) {
    // The word may be a command of one of these commands: `merge` is a command of `ckpt`.
    const auto is_it = [&](const CLI::App* inner) { return inner->get_name() == given; };
    if (nearest.empty() && !each->get_subcommands(is_it).empty()) nearest = each->get_name() + " " + given;
  }
  text += nearest.empty() ? file : " (did you mean " + nearest + "?)";
  const auto* const program = command.get_parent() == nullptr ? "; a program is started by tessera launch -n 2 PROGRAM" : "";
  return ConfigError(text + "; choose one of " + CLI::detail::join(known, ", ") + program);
}

/// Returns the arguments with dashes in place of the underscores in flags, and with --help at the end in place of the command "help".
/// Throws ConfigError for unknown flags and commands before CLI11 parses, because CLI11 would first complain of required flags that are
/// missing.
inline std::vector<std::string> known_arguments(const CLI::App& app, std::vector<std::string> arguments, const Reasons& reasons) {
  const auto* command = &app;
  bool has_flags = false, wants_help = false;
  size_t places = 0;  // how many positional arguments there were so far
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& argument = arguments[i];
    if (argument.size() > 1 && argument.front() == '-' && argument != "--") {
      const auto end = argument[1] == '-' ? std::min(argument.find('='), argument.size()) : 2;
      auto name = argument.substr(0, end);
      std::ranges::replace(name, '_', '-');
      const auto* flag = command->get_option_no_throw(name);
      // "-n2" is the flag -n with its value; "-np" is a flag of mpirun, not -n with the value p.
      const bool is_word = argument[1] != '-' && argument.size() > 2 && std::isdigit(static_cast<unsigned char>(argument[2])) == 0;
      if (flag != nullptr && is_word && argument[2] == '=') {
        const auto& names = flag->get_lnames();
        const auto or_long = names.empty() ? "" : " or --" + names.front() + argument.substr(2);
        throw ConfigError("'" + argument + "' is not how flags are written; write " + name + " " + argument.substr(3) + or_long);
      }
      if (flag == nullptr || is_word) throw no_such_flag(*command, argument, reasons);
      argument.replace(0, end, name);
      has_flags = true;
      const bool needs_value = flag->get_items_expected_min() > 0 && argument.size() == end;
      if (needs_value && ++i == arguments.size()) throw ConfigError(name + " needs a value; see " + help_command(*command));
      if (arguments[i].empty() || arguments[i] == name + "=") throw ConfigError("the value of " + name + " is empty");
    } else if (command->get_prefix_command()) {  // the program to start; all words after it are its arguments
      const auto place = arguments.begin() + static_cast<std::ptrdiff_t>(i);
      if (wants_help) {
        arguments.erase(place, arguments.end());
        break;
      }
      if (argument == "--") arguments.erase(place);
      return arguments;
    } else if (argument == "--") {
      break;  // all later words are arguments, even if they look like flags
    } else {
      const auto is_it = [&](const CLI::App* each) { return each->get_name() == argument; };
      const bool has_commands = !command->get_subcommands({}).empty();
      if (has_commands && argument == "help") {
        arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i--));
        wants_help = has_flags = true;
        continue;
      }
      const auto found = command->get_subcommands(is_it);
      const auto has_place = [](const CLI::Option* option) { return option->get_positional(); };
      size_t most = 0;  // how many positional arguments the command takes
      for (const auto* option : command->get_options(has_place)) most += static_cast<size_t>(option->get_items_expected_max());
      if (found.empty() && places < most) {
        places++;
        continue;
      }
      if (found.empty()) throw no_such_command(*command, argument, reasons);
      command = found.front();
      has_flags = wants_help;
      places = 0;
    }
  }
  if (!has_flags && command->get_require_subcommand_min() > 0) throw no_such_command(*command, "", reasons);
  if (wants_help) arguments.emplace_back("--help");
  return arguments;
}

}  // namespace tessera::cli
