// The command line of a program, over CLI11: flags with dashes or underscores, errors that name the nearest flag, exit statuses. A header
// of its own, because only programs need CLI11. What words may stand where is in known_words.h.
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

// Exit statuses, beside those that a program gives by itself.
inline constexpr int kFailed = 1, kWrongUsage = 2;

/// Throws if something that was printed did not reach standard output.
inline void expect_printed() {
  const int reason = std::fflush(stdout) == 0 ? 0 : errno;
  if (reason == 0 && std::ferror(stdout) == 0) return;
  throw IoError(std::string("standard output can't be written: ") + (reason == 0 ? "an earlier write failed" : std::strerror(reason)));
}

/// An error of CLI11 in our words.
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
    if (std::ranges::find(left, "--") != left.end()) return "'--' stands before a program, and there is none here; leave it out";
  }
  if (dynamic_cast<const CLI::ConversionError*>(&error) == nullptr) return text;
  const auto value = after(" = ");  // Could not convert: --seed = x
  const auto name = text.substr(text.find("--"), text.find(" = ") - text.find("--"));
  const auto* flag = command.get_option_no_throw(name);
  if (flag != nullptr && flag->get_items_expected_max() == 0) return name + " takes no value";
  return name + ": '" + value + "' is not a whole number, or too large";
}

/// Reads the command line, which calls the callbacks of `app`. Returns whether the program shall run: not after --help.
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

/// Why a program has no flag of this name: launch takes it. Empty if launch does not, either.
inline std::string why_of_launch(const CLI::App& program, const std::string& word) {
  const bool is_ranks = word.starts_with("-n") && word.find_first_not_of("0123456789", 2) == std::string::npos;
  auto key = word.substr(std::min<size_t>(2, word.size()));
  std::ranges::replace(key, '-', '_');
  const bool is_key = word.starts_with("--") && (key == "config_file" || config::find_key(key) != nullptr);
  if (!is_ranks && !is_key && word != "-np" && word != "--nproc-per-node" && word != "--max-restarts" && word != "--nnodes") return {};
  const std::string flag = is_ranks || word == "-np" ? "-n 2" : word + (word.find('=') == std::string::npos ? " VALUE" : "");
  return "it is a flag of launch, and stands before the program: tessera launch " + flag + " " + program.get_name();
}

/// A program with a command line.
class Program : public CLI::App {
 public:
  /// `examples` are the command lines that its help shows.
  Program(const std::string& description, const std::string& name, const std::vector<std::string>& examples = {})
      : CLI::App(description, name) {
    group("Commands");  // of its commands, which take it over
    formatter(std::make_shared<Help>());
    footer(Help::footer_of(examples));
    set_help_flag("-h,--help", "Print this help and exit");
  }

  /// Adds the flags that say on which devices a program trains.
  void add_device_flags() {
    add_option("--device", device_, "Where to train: cpu, cuda or xla; unless given as TESSERA_DEVICE says")->type_name("NAME")->check(one_of({"cpu", "cuda", "xla"}));
    add_option("--num-cores", cores_, "XLA devices, each of which is a rank; all that there are unless given, of CPUs one")->type_name("N")->check(from_to(1, 1024));
    add_flag("--metrics-debug", reports_, "Print at the end what XLA devices have done");
    add_option("--compile-for", compile_for_,
               "Train nothing: say what a step needs on XLA devices that need not be here, such as v5p:4x4x8,wrap=1,1,1 or cpu:8")
        ->type_name("NAME");
  }

  /// Sets a function that tells why words of other programs are refused.
  void set_reasons(Reasons reasons) { reasons_ = std::move(reasons); }

  /// Reads the command line and runs `body`. Returns the exit status. Errors are printed: those of callbacks are wrong usage.
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
  /// Sets the variables that tessera::init reads. `tessera xla compile` has set them for the programs that it runs.
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

  /// Becomes `tessera xla compile`, which runs this program again, on no device.
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
    throw Error("--compile-for runs the command tessera, which is neither beside this program nor in PATH: " + std::string(std::strerror(errno)));
  }

  Reasons reasons_ = why_of_launch;
  std::string device_, compile_for_;
  int cores_ = 0;
  bool reports_ = false;
};

}  // namespace tessera::cli
