// The commands of a program with their flags, read from its CLI11 command line. Completion scripts are made from them.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tessera::cli {

/// The words that are possible at a place of the command line.
enum class Words { None, Any, Choices, Paths, Program };

struct FlagWords {
  std::vector<std::string> names;  // "-n", "--nproc-per-node"
  std::string description;
  Words value = Words::None;
  std::vector<std::string> choices;
};

struct CommandWords {
  std::string path;  // "tessera ckpt merge"
  std::string name;
  std::string description;
  std::vector<FlagWords> flags;
  std::vector<CommandWords> commands;
  Words rest = Words::None;  // the kind of words that are neither flags nor commands
  std::vector<std::string> choices;
};

CommandWords command_tree(const CLI::App& app);

/// Returns the command and all commands below it, each before its own commands.
std::vector<const CommandWords*> all_commands(const CommandWords& top);

}  // namespace tessera::cli
