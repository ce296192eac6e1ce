// `tessera config`: makes, changes, explains and converts configurations.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <filesystem>
#include <memory>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/config/explain.h"
#include "tessera/cli/config/prompt.h"
#include "tessera/cli/config/questions.h"
#include "tessera/cli/help.h"
#include "tessera/config/settings.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// Which answers may be given in advance: none, answers for keys, or also answers to questions that belong to no key.
enum class Answers { None, OfKeys, OfQuestions };

struct CommandFlags {
  std::string file, answers, mixed_precision, output;
  std::vector<std::string> assignments;
  bool overwrites = false, is_for_accelerate = false;
  GivenAnswers given = {};

  fs::path place() const {
    std::error_code unknown;
    if (fs::is_directory(file, unknown)) throw ConfigError("--config-file {} is a folder; name a file in it", file);
    return file.empty() ? config::default_file() : fs::path(file);
  }

  /// Reads the answers that were given in advance. --set wins over --answers.
  void read_given(Answers allowed) {
    if (!answers.empty()) read_given_answers(given, answers);
    if (!mixed_precision.empty()) given["mixed_precision"] = {mixed_precision, config::Origin::Flag, "--mixed-precision"};
    for (const auto& assignment : assignments) add_given_answer(given, assignment);
    for (const auto& [name, answer] : given) {
      if (allowed == Answers::OfQuestions && is_question(name)) continue;
      config::Settings().set(name, answer.value, answer.origin, answer.where);
    }
  }
};

void print_remarks(const config::Settings& settings) {
  for (const auto& remark : settings.remarks()) fmt::print(stderr, "{}\n", remark);
}

void write_configuration(const config::Settings& settings, const fs::path& place) {
  print_remarks(settings);
  if (place.has_parent_path()) make_folder(place.parent_path());
  write_text(place, place.extension() == ".json" ? config::to_json(settings) : config::to_yaml(settings));
  fmt::print("wrote {}\n", place.string());
}

config::Settings read_configuration(const fs::path& place) {
  if (!is_there(place)) throw ConfigError("there is no configuration {}; tessera config makes one", place);
  config::Settings settings;
  settings.read_file(place);
  return settings;
}

/// Returns the file to which a changed configuration is written: the file of --output-file, or else the file that was read.
fs::path place_to_write(const CommandFlags& flags) {
  if (flags.output.empty() && config::is_deepspeed_file(flags.place())) {
    throw ConfigError(
        "{} is a DeepSpeed file, and DeepSpeed can't read what would be written in its place; name a new file with --output-file",
        flags.place());
  }
  if (!flags.output.empty() && is_there(flags.output)) {
    throw ConfigError("--output-file {} is there already; remove it, or name another", flags.output);
  }
  return flags.output.empty() ? flags.place() : fs::path(flags.output);
}

int ask_all(const CommandFlags& flags) {
  write_configuration(interview(ask_user, flags.given), flags.place());
  return 0;
}

int write_defaults(const CommandFlags& flags) {
  const auto place = flags.place();
  if (is_there(place)) {
    throw ConfigError("{} is there already; change it with tessera config update --set KEY=VALUE, or name another with --config-file",
                      place);
  }
  write_configuration(default_settings(flags.given), place);
  return 0;
}

int update(const CommandFlags& flags) {
  auto settings = read_configuration(flags.place());
  set_given(settings, flags.given);
  settings.expect_consistent();
  write_configuration(flags.is_for_accelerate ? config::for_accelerate(settings) : settings, place_to_write(flags));
  return 0;
}

int explain(const CommandFlags& flags) {
  config::Settings settings;
  if (const auto file = flags.file.empty() ? config::usual_file() : fs::path(flags.file); !file.empty())
    settings = read_configuration(file);
  settings.read_environment();
  set_given(settings, flags.given);
  fmt::print("{}", explanation(settings));
  settings.expect_consistent();
  return 0;
}

int convert_to_fsdp2(const CommandFlags& flags) {
  const auto from = read_configuration(flags.place());
  const bool is_converted = from.text("fsdp_version") == "2";
  if (is_converted) fmt::print("{} has fsdp_version 2 already{}\n", flags.place().string(), flags.overwrites ? "; nothing was written" : "");
  if (is_converted && flags.overwrites) return 0;
  if (from.text("distributed_type") != "FSDP") {
    throw ConfigError("{} has no FSDP to convert: distributed_type is {}", flags.place(), from.text("distributed_type"));
  }
  write_configuration(config::to_fsdp2(from), place_to_write(flags));
  return 0;
}

using SharedFlags = std::shared_ptr<CommandFlags>;

SharedFlags add_part(CLI::App& command, std::function<int()>& chosen, int (*run)(const CommandFlags&), Answers allowed = Answers::OfKeys) {
  const auto flags = std::make_shared<CommandFlags>();
  command
      .add_option("--config-file", flags->file,
                  "The file; that of Accelerate unless given: ~/.cache/huggingface/accelerate/default_config.yaml")
      ->type_name("FILE");
  command.callback([&command, &chosen, flags, run, allowed] {
    if (!command.get_subcommands().empty()) return;
    flags->read_given(allowed);
    chosen = [flags, run] { return run(*flags); };
  });
  if (allowed == Answers::None) return flags;
  command.add_option("--set", flags->assignments, "Set a key, so that it is not asked for; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false)
      ->take_all();
  command.add_option("--answers", flags->answers, "A YAML file with keys and values, in place of many --set")->type_name("FILE");
  return flags;
}

void add_to_fsdp2(CLI::App& command, std::function<int()>& chosen) {
  auto* part = command.add_subcommand("to-fsdp2", "Writes a configuration with the keys of fsdp_version 2");
  const auto flags = add_part(*part, chosen, convert_to_fsdp2, Answers::None);
  part->add_option("--output-file", flags->output, "The new file")->type_name("FILE");
  part->add_flag("--overwrite", flags->overwrites, "Replace the file that is converted");
  part->parse_complete_callback([flags] {
    if (flags->output.empty() == !flags->overwrites) throw ConfigError("give either --output-file FILE or --overwrite");
  });
  part->footer(Help::footer_of({"tessera to-fsdp2 --config-file old.yaml --output-file new.yaml"},
                               "Lists the settings that version 2 has no key for. Copies of the model become sizes in parallelism_config."));
}

}  // namespace

void add_config_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("config", "Asks how to train, and writes a configuration for launch");
  add_part(*command, chosen, ask_all, Answers::OfQuestions);
  command->footer(Help::footer_of({"tessera config", "tessera config --set num_processes=8 --config-file run.yaml",
                                   "tessera config default --mixed-precision bf16", "tessera config explain --config-file run.yaml"},
                                  "The files have the format of Accelerate's, and may have a section tessera_config. Questions whose "
                                  "answer would change nothing here are left out."));
  auto* defaults = command->add_subcommand("default", "Writes a configuration without questions");
  const auto flags = add_part(*defaults, chosen, write_defaults);
  defaults->add_option("--mixed-precision", flags->mixed_precision, "no, bf16 or fp16")->type_name("DTYPE");
  defaults->footer(Help::footer_of({"tessera config default --set num_processes=4 --config-file run.yaml"},
                                   "Without --set num_processes there is one rank."));
  auto* change = command->add_subcommand("update", "Rewrites a configuration with current keys, and changes values");
  const auto of_change = add_part(*change, chosen, update);
  change->add_option("--output-file", of_change->output, "The new file; unless given, the old one is replaced")->type_name("FILE");
  change->add_flag("--for-accelerate", of_change->is_for_accelerate, "Leave out tessera_config, because Accelerate refuses files with it")
      ->needs("--output-file");
  change->footer(Help::footer_of(
      {"tessera config update --set mixed_precision=bf16", "tessera config update --config-file zero3.json --output-file run.yaml"},
      "Comments are lost. Settings of DeepSpeed become those of FSDP. A file whose name ends in .json is written as JSON."));
  auto* reasons = command->add_subcommand("explain", "Prints each value and where it comes from");
  add_part(*reasons, chosen, explain);
  reasons->footer(Help::footer_of({"tessera config explain --config-file zero3.json"},
                                  "A flag wins over a variable of the environment, that over the file, and that over the default."));
  add_to_fsdp2(*command, chosen);
  add_to_fsdp2(app, chosen);
}

}  // namespace tessera::cli
