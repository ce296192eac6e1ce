// Program: a command line over CLI11. Flags may have dashes or underscores, errors name the nearest flag, and the exit status says what
// went wrong. This is a header of its own because only programs need CLI11. known_words.h checks the words of the command line.
#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/error_record.h"
#include "tessera/base/words.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"
#include "tessera/config/keys.h"

namespace tessera::cli {

// Exit statuses of every program. A program may return others, too.
inline constexpr int kFailed = 1, kWrongUsage = 2;

/// Throws IoError if something that was printed did not reach standard output.
inline void expect_printed() {
  const int reason = std::fflush(stdout) == 0 ? 0 : errno;
  if (reason == 0 && std::ferror(stdout) == 0) return;
  throw IoError(std::string("standard output can't be written: ") + (reason == 0 ? "an earlier write failed" : std::strerror(reason)));
}

/// Returns the message of a CLI11 error in the words of Tessera's own errors.
inline std::string words_of(const CLI::App& command, const CLI::ParseError& error) {
  std::string text = error.what();
  const auto after = [&](const std::string& words) {
    return text.substr(std::min(text.find(words), text.size() - words.size()) + words.size());
  };
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr)
    return text.substr(0, text.find(':')) + " is given more than once; leave all but one out";
  if (dynamic_cast<const CLI::ExcludesError*>(&error) != nullptr)
    return text.substr(0, text.find(' ')) + " contradicts " + after(" excludes ") + "; leave one of them out";
  if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
    const auto* missing = command.get_option_no_throw(text.substr(0, text.find(' ')));
    return missing != nullptr && missing->get_positional() ? missing->get_name(true) + after(missing->get_name()) : text;
  }
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    const auto left = command.remaining();
    if (std::ranges::find(left, "--") != left.end()) return "'--' comes before a program to start, and this command starts none; leave '--' out";
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error) == nullptr) return text;
  const auto value = after(" = ");  // the text is "Could not convert: --seed = x"
  const auto name = text.substr(text.find("--"), text.find(" = ") - text.find("--"));
  const auto* flag = command.get_option_no_throw(name);
  if (flag != nullptr && flag->get_items_expected_max() == 0) return name + " takes no value";
  return name + ": '" + value + "' is not a whole number, or too large";
}

/// Parses the command line and calls the callbacks of `app`. Returns whether the program has to run, which it has not after --help or
/// --version.
inline bool read_flags(CLI::App& app, std::vector<std::string> arguments, const Reasons& reasons = {}) try {
  arguments = known_arguments(app, std::move(arguments), reasons);
  std::ranges::reverse(arguments);  // the order that CLI11 takes
  app.parse(std::move(arguments));
  return true;
} catch (const CLI::Success& answer) {
  app.exit(answer);
  return false;
} catch (const CLI::ParseError& error) {
  const auto* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  throw ConfigError(words_of(*command, error) + "; see " + help_command(*command));
}

/// Returns the reason if a program lacks this flag because it is a flag of launch, and an empty text otherwise.
inline std::string why_of_launch(const CLI::App& program, const std::string& word) {
  const bool is_ranks = word.starts_with("-n") && word.find_first_not_of("0123456789", 2) == std::string::npos;
  auto key = word.substr(std::min<size_t>(2, word.size()));
  std::ranges::replace(key, '-', '_');
  const bool is_key = word.starts_with("--") && (key == "config_file" || config::find_key(key) != nullptr);
  if (!is_ranks && !is_key && word != "-np" && word != "--nproc-per-node" && word != "--max-restarts" && word != "--nnodes") return {};
  const std::string flag = is_ranks || word == "-np" ? "-n 2" : word + (word.find('=') == std::string::npos ? " VALUE" : "");
  return "it is a flag of launch; write it before the program: tessera launch " + flag + " " + program.get_name();
}

/// A program with a command line: parses the flags, runs the body, prints errors, and returns the exit status.
class Program : public CLI::App {
 public:
  /// `examples` are the command lines that its help shows.
  Program(const std::string& description, const std::string& name, const std::vector<std::string>& examples = {})
      : CLI::App(description, name) {
    group("Commands");  // the heading of the commands in the help; CLI11 copies the group to each command that is added
    formatter(std::make_shared<Help>());
    footer(Help::footer_of(examples));
    set_help_flag("-h,--help", "Print this help and exit");
  }

  /// Adds --device, --num-cores, --metrics-debug and --compile-for, which say on which devices a program trains.
  void add_device_flags() {
    add_option("--device", device_, "Where to train: cpu, cuda or xla; what TESSERA_DEVICE says unless given")->type_name("NAME")->check(one_of({"cpu", "cuda", "xla"}));
    add_option("--num-cores", cores_, "How many XLA devices to use, each as one rank; unless given, all that there are, but one CPU")->type_name("N")->check(from_to(1, 1024));
    add_flag("--metrics-debug", reports_, "Print metrics of the XLA devices at the end");
    add_option("--compile-for", compile_for_,
               "Train nothing: compile a step for XLA devices that need not be here, such as v5p:4x4x8,wrap=1,1,1 or cpu:8, and say what it needs")
        ->type_name("NAME");
  }

  /// Sets the function that tells why the program refuses a flag or command of another launcher.
  void set_reasons(Reasons reasons) { reasons_ = std::move(reasons); }

  /// Parses the command line, runs `body` and returns the exit status. Prints errors: an error in the command line gives kWrongUsage, any
  /// other error kFailed.
  int run(int argc, char** argv, const std::function<int()>& body) {
    int status_of_error = kWrongUsage;
    try {
      const bool runs = read_flags(*this, {argv + 1, argv + argc}, reasons_);
      status_of_error = kFailed;
      if (runs) use_devices(argc, argv);
      const int status = runs ? body() : 0;
      if (status == 0) expect_printed();
      return status;
    } catch (const std::exception& error) {
      record_error(error.what());
      std::fprintf(stderr, "%s: %s\n", get_name().c_str(), printable(error.what(), "\n").c_str());
      return status_of_error;
    }
  }

 private:
  /// Sets the variables that tessera::init reads, unless `tessera xla compile` runs this program and has set them already.
  void use_devices(int argc, char** argv) const {
    if (env("TESSERA_XLA_TRACE_ONLY")) return;
    if (!compile_for_.empty()) become_compiler(argc, argv);
    const auto tell = [](const char* variable, const std::string& value) {
      if (!value.empty()) ::setenv(variable, value.c_str(), /*overwrite=*/1);
    };
    tell("TESSERA_DEVICE", device_);
    tell("TESSERA_XLA_DEVICES", cores_ > 0 ? std::to_string(cores_) : "");
    tell("TESSERA_XLA_METRICS", reports_ ? "1" : "");
  }

  /// Replaces this process by `tessera xla compile`, which runs the program again without a device.
  [[noreturn]] void become_compiler(int argc, char** argv) const {
    if (env("WORLD_SIZE").value_or("1") != "1")
      throw ConfigError("--compile-for runs in one process, which stands for all devices: give tessera launch --nproc-per-node 1");
    const auto self = std::filesystem::read_symlink("/proc/self/exe");
    const auto beside = self.parent_path() / "tessera";
    const std::string tessera = std::filesystem::exists(beside) ? beside.string() : "tessera";
    std::vector<std::string> words = {tessera, "xla", "compile", "--topology", compile_for_, "--", self.string()};
    words.insert(words.end(), argv + 1, argv + argc);
    std::vector<char*> pointers;
    for (auto& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    std::fflush(stdout);
    ::execvp(pointers.front(), pointers.data());
    throw Error("--compile-for runs the command tessera, which is neither in the folder of this program nor in PATH: " + std::string(std::strerror(errno)));
  }

  Reasons reasons_ = why_of_launch;
  std::string device_, compile_for_;
  int cores_ = 0;
  bool reports_ = false;
};

}  // namespace tessera::cli
