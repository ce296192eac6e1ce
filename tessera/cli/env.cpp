// `tessera env`: prints what a bug report should say about the machine and the build.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <sstream>

#include "tessera/base/env.h"
#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/base/loaded_libtorch.h"
#include "tessera/base/process.h"
#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/facts.h"
#include "tessera/cli/help.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/engines.h"
#include "tessera/config/settings.h"
#include "tessera/version.h"

namespace tessera::cli {
namespace {

Chapter facts_of_tessera() {
#ifdef __clang__
  const std::string compiler = __VERSION__;
#else
  const std::string compiler = "GCC " __VERSION__;
#endif
  return {"tessera",
          {fact("version", version()), fact("build", TESSERA_BUILD), fact("compiler", compiler), fact("program", this_program())}};
}

/// Returns the file of the library that has the function.
std::string library_of(const void* function) {
  Dl_info info = {};
  return ::dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "unknown";
}

Chapter facts_of_libtorch() {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  std::string text;
  std::istringstream config(at::show_config());
  for (std::string line; std::getline(config, line);) {
    line.erase(0, line.find_first_not_of(" -"));
    if (line.empty() || line.starts_with("PyTorch built with")) continue;
    lines.push_back(line);
    // Compiler flags fill pages, so only --json has them.
    text += line.starts_with("Build settings") ? "\n    Build settings: see --json" : "\n    " + line;
  }
  return {"libtorch",
          {fact("version", loaded_libtorch()),
           fact("headers", TORCH_VERSION),
           fact("library", library_of(reinterpret_cast<const void*>(&at::show_config))),
           fact("abi", fmt::format("std::string of C++{}", _GLIBCXX_USE_CXX11_ABI != 0 ? "11" : "98")),
           fact("cuda", at::hasCUDA() ? "yes" : "no"),
           fact("threads", std::to_string(at::get_num_threads())),
           {"built_with", lines, text}}};
}

Chapter facts_of_transports() {
  Chapter chapter{"transports", {}};
  for (const auto& engine : engines()) {
    const auto why_not = engine.why_not();
    chapter.facts.push_back(fact(std::string(engine.name), why_not.empty() ? "yes" : "no: " + why_not));
  }
  return chapter;
}

Chapter (*chapter_of_xla)() = nullptr;

/// Lists the plugins of XLA devices, or says why there can be none.
Chapter facts_of_xla() {
  return chapter_of_xla != nullptr ? chapter_of_xla() : Chapter{"xla_plugins", {fact("cpu", "no: " + why_none_of("xla"))}};
}

/// The transport that init() would take, and why.
std::string transport_here(bool is_lone) {
  const auto given = env("TESSERA_TRANSPORT");
  if (given && *given != "auto") return *given + ": TESSERA_TRANSPORT names it";
  if (is_lone) return "self: this is a lone process";
  if (!default_device().is_cpu()) return "auto: by the devices of the ranks";
  if (meeting_point().one_host) return "shm: all ranks are on this host; gloo, if they can't share memory";
  return "auto: shm if all ranks are on one host, gloo otherwise";
}

/// Describes the launcher as init() would see it.
std::vector<Fact> rank_here() try {
  const auto identity = identity_from_environment();
  if (!identity) {
    return {fact("this_process", {}, "not started by a launcher: a world of one rank"), fact("transport", transport_here(true))};
  }
  return {fact("this_process", fmt::format("rank {} of {}", identity->rank, identity->world_size)),
          fact("started_by", launcher_in_words()), fact("transport", transport_here(false))};
} catch (const ConfigError& error) {
  return {fact("this_process", fmt::format("error: {}", error.what()))};
}

/// Lists the configuration file that launch would read, and the settings in it.
std::vector<Fact> facts_of_configuration() try {
  const auto file = config::usual_file();
  if (file.empty()) return {fact("file", {}, "none: tessera config makes one")};
  std::vector<Fact> facts = {fact("file", file.string())};
  try {
    config::Settings settings;
    settings.read_file(file);
    for (const auto& key : config::keys()) {
      if (settings.is_set(key.name)) facts.push_back(fact(std::string(key.name), settings.text(key.name)));
    }
  } catch (const Error& error) {
    facts.push_back(fact("error", error.what()));
  }
  return facts;
} catch (const Error& error) {  // there is no home folder in which to look for the file
  return {fact("error", error.what())};
}

bool is_of_launchers(std::string_view name) {
  constexpr std::array<std::string_view, 13> kPrefixes = {
      "SLURM_",  "PMI_",        "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL",          "TORCHELASTIC_",
      "MASTER_", "ACCELERATE_", "FSDP_", "GROUP_",           "GLOO_",           "PARALLELISM_CONFIG_"};
  const auto numbering = launcher_variables();
  return std::ranges::find(numbering, name) != numbering.end() ||
         std::ranges::any_of(kPrefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

bool is_of_threads(std::string_view name) {
  return name.starts_with("OMP_") || name.starts_with("KMP_") || name.starts_with("GOMP_") || name.starts_with("MKL_") ||
         name == "CUDA_VISIBLE_DEVICES" || name == "LD_PRELOAD" || name == "LD_LIBRARY_PATH";
}

/// Returns the variables whose names `is_meant` accepts, sorted by name. Hides the values of secrets.
std::vector<Fact> variables(const std::function<bool(std::string_view)>& is_meant) {
  std::vector<Fact> found;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string text = *entry;
    const auto name = text.substr(0, text.find('='));
    if (!is_meant(name) || name.size() + 1 >= text.size()) continue;
    const bool is_secret = name.ends_with("SECRET") || name.ends_with("TOKEN") || name.ends_with("KEY") || name.ends_with("PASSWORD");
    auto own = fact(name, is_secret ? "(set, not shown)" : text.substr(name.size() + 1));
    if (!is_known_env(name)) own.text += "  (Tessera does not read this one)";
    found.push_back(std::move(own));
  }
  std::ranges::sort(found, {}, &Fact::name);
  return found;
}

std::vector<Chapter> all_facts() {
  std::vector<Chapter> all = {facts_of_tessera(), facts_of_libtorch(), facts_of_transports(), facts_of_xla()};
  std::ranges::move(facts_of_machine(), std::back_inserter(all));
  all.push_back({"configuration", facts_of_configuration()});
  all.push_back({"launcher", rank_here()});
  std::ranges::move(variables(is_of_launchers), std::back_inserter(all.back().facts));
  all.push_back({"environment", variables([](std::string_view name) { return name.starts_with("TESSERA_") || is_of_threads(name); })});
  return all;
}

void print_for_people(const std::vector<Chapter>& all) {
  for (const auto& [name, facts] : all) {
    fmt::print("{}\n", name);
    if (facts.empty()) fmt::print("  nothing is set\n");
    std::vector<std::array<std::string, 2>> rows;
    for (const auto& fact : facts) {
      auto words = "  " + fact.name;
      if (name != "environment" && name != "launcher" && name != "configuration" && name != "transports" && name != "xla_plugins") std::ranges::replace(words, '_', ' ');
      rows.push_back({words, fact.text});
    }
    fmt::print("{}", table_of(rows, "<<"));
  }
}

void print_as_json(const std::vector<Chapter>& all) {
  nlohmann::ordered_json root;
  for (const auto& [name, facts] : all) {
    auto& chapter = root[name] = nlohmann::ordered_json::object();
    for (const auto& fact : facts) chapter[fact.name] = fact.value;
  }
  fmt::print("{}\n", root.dump(2));
}

}  // namespace

AddedXlaFacts::AddedXlaFacts(Chapter (*facts)()) {
  chapter_of_xla = facts;
}

void add_env_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("env", "Describes this machine and this build, for bug reports");
  const auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "As JSON: sizes in bytes, null for what is unknown or has no limit");
  command->footer(Help::footer_of({"tessera env", "tessera env --json >env.json", "tessera launch -n 2 tessera env"}));
  command->callback([&chosen, as_json] {
    chosen = [as_json] {
      *as_json ? print_as_json(all_facts()) : print_for_people(all_facts());
      return 0;
    };
  });
}

}  // namespace tessera::cli
