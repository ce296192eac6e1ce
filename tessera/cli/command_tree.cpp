#include "tessera/cli/command_tree.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>

namespace tessera::cli {
namespace {

/// Returns the text up to its first full stop or semicolon, because shells list descriptions in little space.
std::string beginning(const std::string& text) {
  return text.substr(0, std::min(text.find(". "), text.find("; ")));
}

/// Returns {"shm", "gloo"} for an option whose type is "TEXT:{shm,gloo}".
std::vector<std::string> choices_of(const CLI::Option& option) {
  const auto type = option.get_type_name();
  const auto begin = type.find('{'), end = type.rfind('}');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return {};
  return CLI::detail::split(type.substr(begin + 1, end - begin - 1), ',');
}

bool names_a_path(const CLI::Option& option) {
  constexpr std::array<std::string_view, 3> kTypes = {"FILE", "FOLDER", "P"};
  return option.get_positional() || std::ranges::find(kTypes, option.get_type_name()) != kTypes.end();
}

Words value_of(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return Words::None;
  if (!choices_of(option).empty()) return Words::Choices;
  return names_a_path(option) ? Words::Paths : Words::Any;
}

FlagWords words_of(const CLI::Option& option) {
  FlagWords flag{.names = {}, .description = beginning(option.get_description()), .value = value_of(option), .choices = choices_of(option)};
  for (const auto& name : option.get_snames()) flag.names.push_back("-" + name);
  for (const auto& name : option.get_lnames()) flag.names.push_back("--" + name);
  return flag;
}

CommandWords words_of(const CLI::App& app, const std::string& above) {
  CommandWords command{.path = above + app.get_name(),
                       .name = app.get_name(),
                       .description = beginning(app.get_description()),
                       .flags = {},
                       .commands = {},
                       .rest = app.get_prefix_command() ? Words::Program : Words::None,
                       .choices = {}};
  for (const auto* option : app.get_options()) {
    if (option->get_positional()) {
      command.rest = value_of(*option);
      command.choices = choices_of(*option);
    }
    if (option->nonpositional() && !option->get_group().empty()) {
      command.flags.push_back(words_of(*option));
    }
  }
  for (const auto* each : app.get_subcommands([](const CLI::App* one) { return !one->get_group().empty(); })) {
    command.commands.push_back(words_of(*each, command.path + " "));
  }
  return command;
}

}  // namespace

CommandWords command_tree(const CLI::App& app) {
  return words_of(app, "");
}

std::vector<const CommandWords*> all_commands(const CommandWords& top) {
  std::vector<const CommandWords*> all = {&top};
  for (const auto& command : top.commands) std::ranges::copy(all_commands(command), std::back_inserter(all));
  return all;
}

}  // namespace tessera::cli
