#include "tessera/cli/config/key_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/keys.h"

namespace tessera::cli {
namespace {

std::string flag_of(std::string_view key) {
  auto flag = fmt::format("--{}", key);
  std::ranges::replace(flag, '_', '-');
  return flag;
}

/// Returns all names of a key's flag, for errors, because ConfigFlags does not know which of the names the user wrote.
std::string any_flag_of(const config::Key& key) {
  return flag_of(key.name) + (key.flag.empty() ? "" : fmt::format(" ({})", key.flag));
}

/// Returns the values of a key's flag in the form in which help shows them and shells complete them.
std::string values_of(const config::Key& key) {
  if (key.kind == config::Kind::Bool) return "TEXT:{true,false}";
  if (key.kind == config::Kind::Choice) return fmt::format("TEXT:{{{}}}", fmt::join(key.choices, ","));
  return key.kind == config::Kind::Text ? "TEXT" : "N";
}

std::string group_of(const config::Key& key) {
  if (!config::has_effect(key)) return "";
  return key.section == config::Section::Tessera ? "Configuration, beyond Accelerate" : "Configuration";
}

std::string sentence(std::string_view text) {
  std::string result(text);
  result.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(result.front())));
  return result;
}

}  // namespace

ConfigFlags::ConfigFlags(CLI::App& command) {
  command.add_option("--config-file", *file_, "A configuration of Tessera, Accelerate or DeepSpeed; the one that `tessera config` writes unless given")
      ->type_name("FILE")
      ->group("Configuration");
  for (const auto& key : config::keys()) {
    command
        .add_option_function<std::string>(
            flag_of(key.name) + (key.flag.empty() ? "" : fmt::format(",{}", key.flag)),
            [values = values_, name = std::string(key.name)](const std::string& value) { (*values)[name] = value; },
            sentence(key.meaning.empty() ? key.reason : key.meaning))
        ->type_name(values_of(key))
        ->group(group_of(key));
  }
  const auto add_short = [&](const std::string& flag, const std::string& key, const std::string& value) {
    command
        .add_flag_callback(
            flag, [values = values_, key, value] { (*values)[key] = value; }, fmt::format("The same as {} {}", flag_of(key), value))
        ->group("Configuration");
  };
  add_short("--use-fsdp", "distributed_type", "FSDP");
  add_short("--multi-gpu", "distributed_type", "MULTI_GPU");
  add_short("--tpu", "distributed_type", "XLA");
  add_short("--cpu", "use_cpu", "true");
}

config::Settings ConfigFlags::settings(std::optional<int> ranks_here) const {
  config::Settings settings;
  if (const auto file = file_->empty() ? config::usual_file() : std::filesystem::path(*file_); !file.empty()) settings.read_file(file);
  settings.read_environment();
  if (const auto nodes = values_->find("num_machines"); nodes != values_->end() && nodes->second.find(':') != std::string::npos) {
    throw ConfigError("--nnodes {}: a job begins with all its nodes; give their number, and --min-ranks for the least number of ranks to continue with",
                      printable(nodes->second));
  }
  for (const auto& [key, value] : *values_) settings.set(key, value, config::Origin::Flag, any_flag_of(*config::find_key(key)));
  // On a single host, --nproc-per-node sets num_processes. On several hosts it does not, because they may have different numbers of ranks.
  if (ranks_here && *ranks_here > 0 && settings.integer("num_machines") == 1 &&
      settings.setting("num_processes").origin != config::Origin::Flag)
    settings.set("num_processes", std::to_string(*ranks_here), config::Origin::Flag, "--nproc-per-node");
  settings.expect_consistent();
  return settings;
}

}  // namespace tessera::cli
