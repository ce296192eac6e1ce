// `tessera completion`: prints scripts for shells, made from the program's own commands and flags.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>

#include "tessera/base/format.h"
#include "tessera/cli/command_tree.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"

namespace tessera::cli {
namespace {

/// Puts a text into single quotes for a shell. `quote` is how the shell writes a single quote inside of them.
std::string in_quotes(const std::string& text, const std::string& quote = R"('\'')") {
  return "'" + CLI::detail::find_and_replace(text, "'", quote) + "'";
}

// --- bash ------------------------------------------------------------------------------------------------------------------------------

constexpr const char* kBashBody = R"(
_tessera_offer() {  # KIND CHOICES CURRENT
  case $1 in
    choices) mapfile -t COMPREPLY < <(compgen -W "$2" -- "$3") ;;
    paths) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$3") ;;
    program) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -c -- "$3"; compgen -f -- "$3") ;;
  esac
}

_tessera() {
  local commands flags valued rest choices command=tessera word i current=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=()
  _tessera_command "$command"
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    if [[ $word == --* ]]; then word=${word//_/-}; fi
    if [[ $word == -* ]]; then
      [[ " $valued " == *" $word "* ]] || continue
      if [[ ${COMP_WORDS[i + 1]} == = ]]; then ((++i)); fi  # bash takes --flag=value for three words
      if ((i + 1 >= COMP_CWORD)); then
        _tessera_value "$command" "$word"
        _tessera_offer "$rest" "$choices" "${current#=}"
        return
      fi
      ((++i))
    elif [[ " $commands " == *" $word "* ]]; then
      command+=" $word"
      _tessera_command "$command"
    elif [[ $rest == program ]]; then
      if declare -F _command_offset >/dev/null; then
        _command_offset "$i"
      else
        _tessera_offer paths '' "$current"
      fi
      return
    fi
  done
  if [[ $current == -* ]]; then
    _tessera_offer choices "$flags" "$current"
  elif [[ $commands ]]; then
    _tessera_offer choices "$commands" "$current"
  else
    _tessera_offer "$rest" "$choices" "$current"
  fi
}

complete -F _tessera tessera
)";

std::string bash_kind(Words words) {
  return words == Words::Choices ? "choices" : words == Words::Paths ? "paths" : words == Words::Program ? "program" : "none";
}

std::string for_bash(const CommandWords& top) {
  std::string commands, values;
  for (const auto* command : all_commands(top)) {
    std::vector<std::string> names, flags, valued;
    for (const auto& each : command->commands) names.push_back(each.name);
    for (const auto& flag : command->flags) {
      std::ranges::copy(flag.names, std::back_inserter(flags));
      if (flag.value == Words::None) continue;
      std::ranges::copy(flag.names, std::back_inserter(valued));
      if (flag.value == Words::Any) continue;
      std::vector<std::string> patterns;
      for (const auto& name : flag.names) patterns.push_back(in_quotes(command->path + " " + name));
      values += fmt::format("    {}) rest={} choices={} ;;\n", fmt::join(patterns, " | "), bash_kind(flag.value),
                            in_quotes(joined(flag.choices, " ")));
    }
    commands += fmt::format("    {})\n      commands={}\n      flags={}\n      valued={}\n      rest={} choices={} ;;\n",
                            in_quotes(command->path), in_quotes(joined(names, " ")), in_quotes(joined(flags, " ")),
                            in_quotes(joined(valued, " ")), bash_kind(command->rest), in_quotes(joined(command->choices, " ")));
  }
  return fmt::format(
             "# Completion of tessera for bash. In ~/.bashrc: source <(tessera completion bash)\n\n"
             "_tessera_command() {{  # what the command $1 takes\n  case $1 in\n{}  esac\n}}\n\n"
             "_tessera_value() {{  # what may follow the flag $2 of the command $1\n  rest=none choices=\n  case \"$1 $2\" in\n{}  "
             "esac\n}}\n",
             commands, values) +
         kBashBody;
}

// --- zsh -------------------------------------------------------------------------------------------------------------------------------

std::string zsh_function(const CommandWords& command) {
  auto name = "_" + command.path;
  std::ranges::replace_if(
      name, [](char c) { return c == ' ' || c == '-'; }, '_');
  return name;
}

/// Returns the text with a backslash before each of these letters.
std::string escaped(std::string text, const std::string& letters) {
  std::string result;
  for (const char c : text) {
    if (letters.find(c) != std::string::npos) result += '\\';
    result += c;
  }
  return result;
}

std::string zsh_action(Words words, const std::vector<std::string>& choices) {
  return words == Words::Choices ? "(" + joined(choices, " ") + ")" : words == Words::Paths ? "_files" : " ";
}

/// Returns lines such as '(-n --ranks)-n[How many]:value: ', one for each name of the flag.
std::string zsh_flag(const FlagWords& flag) {
  std::string lines;
  for (const auto& name : flag.names) {
    auto spec = fmt::format("({}){}", joined(flag.names, " "), name);
    if (flag.value != Words::None) spec += name.starts_with("--") ? "=" : "+";
    spec += "[" + escaped(flag.description, "[]\\:") + "]";
    if (flag.value != Words::None) spec += ":value:" + zsh_action(flag.value, flag.choices);
    lines += fmt::format("    {} \\\n", in_quotes(spec));
  }
  return lines;
}

std::string zsh_of(const CommandWords& command) {
  std::string flags;
  for (const auto& flag : command.flags) flags += zsh_flag(flag);
  if (command.rest == Words::Program) {
    return fmt::format("{}() {{\n  _arguments -S \\\n{}    '(-)1:program:_command_names -e' '*::argument:_normal'\n}}\n\n",
                       zsh_function(command), flags);
  }
  if (command.commands.empty()) {
    const auto rest = in_quotes("*:argument:" + zsh_action(command.rest, command.choices));
    return fmt::format("{}() {{\n  _arguments \\\n{}    {}\n}}\n\n", zsh_function(command), flags, command.rest == Words::None ? "" : rest);
  }
  std::string names, cases;
  for (const auto& each : command.commands) {
    names += fmt::format("        {}\n", in_quotes(escaped(each.name, ":") + ":" + each.description));
    cases += fmt::format("        {}) {} ;;\n", each.name, zsh_function(each));
  }
  return fmt::format(
      "{}() {{\n  local curcontext=$curcontext state line\n  local -A opt_args\n"
      "  _arguments -C \\\n{}    '1: :->command' '*:: :->argument' && return 0\n"
      "  case $state in\n    command)\n      local -a commands=(\n{}      )\n      _describe -t commands command commands ;;\n"
      "    argument)\n      case $line[1] in\n{}      esac ;;\n  esac\n}}\n\n",
      zsh_function(command), flags, names, cases);
}

std::string for_zsh(const CommandWords& top) {
  std::string text = "#compdef tessera\n# Completion of tessera for zsh. In ~/.zshrc, after compinit: source <(tessera completion zsh)\n\n";
  for (const auto* command : all_commands(top)) text += zsh_of(*command);
  return text + "compdef _tessera tessera\n";
}

// --- fish ------------------------------------------------------------------------------------------------------------------------------

std::string for_fish(const CommandWords& top) {
  const auto quoted_here = [](const std::string& text) { return in_quotes(escaped(text, "\\"), "\\'"); };
  std::string paths, lines;
  for (const auto* command : all_commands(top)) {
    paths += " " + quoted_here(command->path);
    const auto here = fmt::format("complete -c tessera -n {}", quoted_here("__tessera_at \"" + command->path + "\""));
    for (const auto& each : command->commands) lines += fmt::format("{} -a {} -d {}\n", here, each.name, quoted_here(each.description));
    for (const auto& flag : command->flags) {
      lines += here;
      for (const auto& name : flag.names) lines += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (flag.value == Words::Paths) lines += " -r -F";
      if (flag.value == Words::Any) lines += " -x";
      if (flag.value == Words::Choices) lines += " -x -a " + quoted_here(joined(flag.choices, " "));
      lines += " -d " + quoted_here(flag.description) + "\n";
    }
    if (command->rest == Words::Choices) lines += fmt::format("{} -a {}\n", here, quoted_here(joined(command->choices, " ")));
    if (command->rest == Words::Paths) lines += here + " -F\n";
    if (command->rest == Words::Program) lines += here + " -x -a '(__fish_complete_subcommand --fcs-skip=2)'\n" + here + " -F\n";
  }
  return fmt::format(
      "# Completion of tessera for fish: tessera completion fish >~/.config/fish/completions/tessera.fish\n\n"
      "function __tessera_at  # whether the words so far lead to this command\n"
      "  set -l at tessera\n"
      "  for word in (commandline -opc)[2..]\n"
      "    contains -- \"$at $word\"{}; and set at \"$at $word\"\n"
      "  end\n"
      "  test \"$at\" = $argv[1]\n"
      "end\n\n"
      "complete -c tessera -f\n{}",
      paths, lines);
}

}  // namespace

void add_completion_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("completion", "Prints a script by which a shell completes commands and flags");
  static const std::map<std::string, std::string (*)(const CommandWords&)> kShells = {
      {"bash", for_bash}, {"fish", for_fish}, {"zsh", for_zsh}};
  std::vector<std::string> names;
  for (const auto& [name, make] : kShells) names.push_back(name);
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "The shell for which the script is")->required()->check(one_of(names));
  command->footer(Help::footer_of({"source <(tessera completion bash)", "source <(tessera completion zsh)",
                                   "tessera completion fish >~/.config/fish/completions/tessera.fish"}));
  command->callback([&app, &chosen, shell] {
    chosen = [&app, shell] {
      fmt::print("{}", kShells.at(*shell)(command_tree(app)));
      return 0;
    };
  });
}

}  // namespace tessera::cli
