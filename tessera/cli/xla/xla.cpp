// `tessera xla`: lists the devices of PJRT plugins, compiles for devices that need not be here, and shows programs that ran.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/cli/help.h"
#include "tessera/base/words.h"
#include "tessera/cli/known_words.h"
#include "tessera/cli/packages.h"
#include "tessera/cli/xla/apart.h"
#include "tessera/cli/xla/program.h"
#include "tessera/cli/xla/trace.h"
#include "tessera/xla/pjrt/client.h"
#include "tessera/xla/pjrt/figures.h"
#include "tessera/xla/pjrt/program_cache.h"
#include "tessera/xla/pjrt/topology.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kDoesNotFit = 3;

struct XlaFlags {
  std::string plugin, topology;
  std::vector<std::string> program;  // a file with a module, or a command to run
  int devices = 1, replicas = 0, effort = 0;
  bool as_json = false;

  /// The variables that tell the plugin for TPUs to compile for a topology without a TPU. Without them, the plugin looks for TPUs on the
  /// network, locks the whole machine, and prints messages about both.
  std::map<std::string, std::string> environment() const {
    if (topology.empty()) return {};
    return {{"TPU_SKIP_MDS_QUERY", "1"},   {"ALLOW_MULTIPLE_LIBTPU_LOAD", "1"}, {"TPU_ACCELERATOR_TYPE", "v5p-8"}, {"TPU_WORKER_HOSTNAMES", "localhost"},
            {"TPU_WORKER_ID", "0"},        {"TPU_MIN_LOG_LEVEL", "3"},          {"TPU_STDERR_LOG_LEVEL", "3"}};
  }
};

std::string gigabytes(int64_t bytes) { return size_text(static_cast<double>(bytes)); }
pjrt::Plugin plugin_of(const XlaFlags& flags) {
  if (!flags.plugin.empty()) return pjrt::Plugin::load(flags.plugin);
  const auto known = pjrt::Topology::plugin_for(flags.topology);
  if (flags.topology.empty() || known == "cpu") return pjrt::Plugin::load();
  if (!known.empty()) return pjrt::Plugin::load(known);
  std::vector<std::string> here;
  for (const auto& installed : pjrt::installed_plugins()) here.push_back(fmt::format("{} ({})", installed.name, installed.wheel));
  throw ConfigError(
      "no plugin is known for the topology '{}': a name is a kind of device and its chips, v5p:2x2x1 for TPUs, h100:1x2x8 for GPUs "
      "or cpu:8 for plugins for CPUs, and --plugin says which plugin knows another; here are {}",
      flags.topology, here.empty() ? "none" : joined(here));
}

Json json_of(const pjrt::Options& options) {
  Json json = Json::object();
  for (const auto& [name, option] : options) std::visit([&, &key = name](const auto& value) { json[key] = value; }, option);
  return json;
}

Json json_of(const pjrt::DeviceDescription& device) {
  return {{"id", device.id},
          {"kind", device.kind},
          {"memory", device.memory ? Json(*device.memory) : Json()},
          {"attributes", json_of(device.attributes)}};
}

/// Prints lines such as "8 of kind TPU v5p, 95.7 GB each".
void print_devices(const std::vector<pjrt::DeviceDescription>& devices) {
  std::map<std::pair<std::string, int64_t>, int> of_kind;
  for (const auto& device : devices) of_kind[{device.kind, device.memory.value_or(0)}]++;
  for (const auto& [kind, count] : of_kind) {
    fmt::print("devices    {} of kind {}{}\n", count, kind.first, kind.second ? fmt::format(", {} each", gigabytes(kind.second)) : "");
  }
}

/// Returns advice if the topology's name leaves out options whose defaults fit no real machine.
std::vector<std::string> advice_on(const std::string& name) {
  std::vector<std::string> notes;
  const bool is_cube = name.starts_with("v4:") || name.starts_with("v5p:") || name.starts_with("tpu7x:");
  if (is_cube && name.find("wrap=") == std::string::npos) {
    notes.emplace_back("without wrap=1,1,1 the links form a mesh in place of a torus, and the compiler makes other programs");
  }
  if (name.starts_with("v4:") && name.find("chip_config_name=") == std::string::npos) {
    notes.emplace_back("without chip_config_name=megacore a chip counts as two devices, each with the memory of both");
  }
  return notes;
}

void print_advice(const XlaFlags& flags) {
  for (const auto& note : advice_on(flags.topology)) fmt::print("note       {}\n", note);
}

int show_devices(const XlaFlags& flags) {
  const auto plugin = plugin_of(flags);
  std::vector<pjrt::DeviceDescription> devices;
  std::string platform;
  if (flags.topology.empty()) {
    const pjrt::Client client(plugin, {.devices = flags.devices});
    devices = client.devices();
    platform = client.platform();
  } else {
    devices = pjrt::Topology(plugin, flags.topology).devices();
  }
  if (flags.as_json) {
    Json root = {{"plugin", plugin.file().string()}, {"pjrt", plugin.version()}, {"attributes", json_of(plugin.attributes())}};
    if (flags.topology.empty()) {
      root["platform"] = platform;
    } else {
      root["topology"] = flags.topology;
      root["notes"] = advice_on(flags.topology);
    }
    root["devices"] = Json::array();
    for (const auto& device : devices) root["devices"].push_back(json_of(device));
    fmt::print("{}\n", root.dump(2));
    return 0;
  }
  fmt::print("plugin     {}\npjrt       {}\n", plugin.file().string(), plugin.version());
  flags.topology.empty() ? fmt::print("platform   {}\n", platform) : fmt::print("topology   {}\n", flags.topology);
  print_devices(devices);
  print_advice(flags);
  return 0;
}

/// Reads the module in a file or, if the file is a program, runs it and traces its step.
TracedStep module_of(const XlaFlags& flags, int replicas) {
  const auto& program = flags.program;
  const InputFile file(program.front());
  char begins[4] = {};
  file.read(begins, std::min<uint64_t>(sizeof begins, file.size()), 0);
  const bool runs = std::string_view(begins, 4) == "\x7f" "ELF" || std::string_view(begins, 2) == "#!";
  if (runs) return traced_step(program, replicas, flags.plugin.empty() ? pjrt::Topology::plugin_for(flags.topology) : flags.plugin);
  if (program.size() > 1) throw ConfigError("{} is not a program that can be run, so it takes no arguments; leave out '{}'", program[0], program[1]);
  return {.text = file.read_all(), .cuts = Json::object()};
}

/// The memory that a compiled program needs on a device, and the memory that the device has.
struct Need {
  int64_t needed = 0;
  std::optional<int64_t> there;
  bool fits() const { return !there || needed <= *there; }
};

/// Prints why the program does not fit and what would reduce its memory. Returns the exit status.
int too_large(const std::string& reason) {
  fmt::print(stderr, "tessera: the program does not fit: {}; less is needed with activation checkpointing, in bf16, in smaller units or batches, or on more devices\n",
             reason);
  return kDoesNotFit;
}

int compile(const XlaFlags& flags) {
  const auto plugin = plugin_of(flags);
  const pjrt::Topology topology(plugin, flags.topology);
  const auto devices = topology.devices();
  const int replicas = flags.replicas ? flags.replicas : static_cast<int>(devices.size());
  if (replicas > std::ssize(devices))
    throw UsageError("{} replicas do not fit on the {} devices of {}", replicas, devices.size(), flags.topology);
  const auto step = module_of(flags, replicas);
  const pjrt::Program program{.text = step.text, .parameters = {}};
  const pjrt::CompileOptions options{.replicas = replicas, .effort = flags.effort};
  Json root = {{"topology", flags.topology}, {"devices", devices.size()}, {"replicas", replicas}, {"notes", advice_on(flags.topology)}};
  const bool is_cut = !step.cuts.value("host_reads", Json::object()).empty();
  const std::string of_cut = "a step is cut: these are the figures of its largest part";
  if (is_cut) root["notes"].push_back(of_cut);
  std::optional<pjrt::CompiledProgram> compiled;
  try {
    compiled = topology.compile(program, options);
  } catch (const Error& error) {
    if (std::string_view(error.what()).find("Ran out of memory") == std::string_view::npos) throw;
    root["fits"] = false;
    if (flags.as_json) fmt::print("{}\n", root.dump(2));
    return too_large(first_line(error));
  }
  // Caches only programs that a run would compile in the same way. A run tunes kernels for GPUs, and does not reduce the effort.
  const auto cache = flags.effort == 0 && pjrt::Topology::plugin_for(flags.topology) != "cuda" ? pjrt::ProgramCache::of_this_user() : std::nullopt;
  if (cache) cache->keep(plugin, devices, program, options, *compiled);
  const auto memory = compiled->memory();
  const auto figures = pjrt::figures_of(*compiled);
  const Need need{.needed = memory.arguments + memory.outputs - memory.aliased + memory.temporary, .there = devices.front().memory};
  if (flags.as_json) {
    root.update({{"device_memory", need.there ? Json(*need.there) : Json()},
                 {"needed", need.needed},
                 {"fits", need.there ? Json(need.fits()) : Json()}});
    root.update(step.cuts);
    root.update(figures);
    fmt::print("{}\n", root.dump(2));
  } else {
    print_devices(devices);
    print_advice(flags);
    fmt::print("replicas   {}\n", replicas);
    print_cuts(step.cuts);
    if (is_cut) fmt::print("note       {}\n", of_cut);
    print_figures(figures);
  }
  if (!need.fits()) return too_large(fmt::format("it needs {} of a device, which has {}", gigabytes(need.needed), gigabytes(*need.there)));
  if (cache && !flags.as_json) fmt::print("kept       for runs on such devices, in {}\n", cache->folder().string());
  if (need.there && !flags.as_json) fmt::print("fits       {} of {}, even if all of it is in use at once\n", gigabytes(need.needed), gigabytes(*need.there));
  return 0;
}

void add_places(CLI::App& command, XlaFlags& flags) {
  command
      .add_option("--plugin", flags.plugin,
                  "cpu, tpu, cuda, or the path of a library; unless given, the plugin for the topology, or TESSERA_PJRT_PLUGIN or cpu")
      ->type_name("NAME");
  command.add_flag("--json", flags.as_json, "As JSON");
}

void add_xla(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("xla", "Lists XLA devices, and compiles for devices that need not be here");
  command->require_subcommand(1);
  command->footer(Help::footer_of({"tessera xla devices", "tessera xla devices --topology v5p:2x2x2,wrap=1,1,1", "tessera xla program ./train"}));
  const auto flags = std::make_shared<XlaFlags>();
  auto* devices = command->add_subcommand("devices", "Lists the devices of a plugin, or of a topology that it can compile for");
  auto* topology = devices->add_option("--topology", flags->topology, "A kind of device, how many, and options: v5p:4x4x8,wrap=1,1,1")->type_name("NAME");
  devices->add_option("--devices", flags->devices, "How many devices a plugin for CPUs makes")->check(from_to(1, pjrt::kMostDevices))->excludes(topology);
  add_places(*devices, *flags);
  devices->footer(Help::footer_of({"tessera xla devices", "tessera xla devices --plugin tpu --json", "tessera xla devices --topology v5p:2x2x2,wrap=1,1,1"}));
  devices->callback([&chosen, flags] {
    chosen = [flags] { return run_apart(flags->environment(), [flags] { return show_devices(*flags); }); };
  });
  add_xla_program_command(*command, chosen);
  auto* compiler = command->add_subcommand("compile", "Says what a program needs on devices that need not be here");
  compiler
      ->add_option("PROGRAM", flags->program,
                   "A file with a StableHLO module or, after --, a program that trains, with its arguments: it runs without a device until its step is traced")
      ->required()
      ->expected(1, 1 << 20);
  compiler->add_option("--topology", flags->topology, "The devices: v5p:4x4x8,wrap=1,1,1 or cpu:8")->type_name("NAME")->required();
  compiler->add_option("--replicas", flags->replicas, "How many devices run it; all unless given")->check(from_to(1, 1 << 20));
  compiler->add_option("--effort", flags->effort, "How hard a TPU's compiler tries, from 9 to 39; its own choice unless given")->check(from_to(9, 39));
  add_places(*compiler, *flags);
  compiler->footer(Help::footer_of({"tessera xla compile step.mlir --topology v5p:4x4x8,wrap=1,1,1 --effort 9",
                                    "tessera xla compile --topology v5p:4x4x8,wrap=1,1,1 -- ./train --layers 32"},
                                   "The status is 3 if the program does not fit."));
  compiler->callback([&chosen, flags] {
    chosen = [flags] { return run_apart(flags->environment(), [flags] { return compile(*flags); }); };
  });
}

const AddedCommand xla_command("xla", add_xla);

}  // namespace
}  // namespace tessera::cli
