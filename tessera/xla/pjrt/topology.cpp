#include "tessera/xla/pjrt/topology.h"

#include <fmt/format.h>

#include <variant>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/xla/pjrt/client.h"
#include "tessera/xla/pjrt/gpus.h"
#include "tessera/xla/pjrt/program_impl.h"

namespace tessera::pjrt {
namespace {

constexpr std::string_view kOfCpu = "cpu:";

/// Makes a client with this number of devices in place of a topology, because CPU plugins can't make topologies.
Client cpus(Plugin plugin, std::string_view number) {
  const auto devices = number_of<int>(number);
  if (!devices || *devices < 1) throw ConfigError("the topology '{}{}' has no number of devices: write cpu:8", kOfCpu, number);
  return Client(std::move(plugin), {.devices = *devices});
}

void expect_no_options(const Options& options, std::string_view name) {
  if (!options.empty()) throw ConfigError("the topology '{}' takes no options: leave '{}' out", name, options.begin()->first);
}

TopologyHandle made_by(const Plugin& plugin, std::string_view name, const Options& options) {
  const auto values = named_values(options);
  const auto made = plugin.api()->call(
      fmt::format("make the topology '{}'", name).c_str(), &PJRT_Api::PJRT_TopologyDescription_Create,
      {.topology_name = name.data(), .topology_name_size = name.size(), .create_options = values.data(), .num_options = values.size()});
  return {plugin.api(), made.topology};
}

}  // namespace

class Topology::Impl {
 public:
  explicit Impl(Client client) : of(std::move(client)) {}
  explicit Impl(TopologyHandle handle, std::optional<int64_t> memory = {}) : of(std::move(handle)), memory(memory) {}
  std::variant<Client, TopologyHandle> of;
  std::optional<int64_t> memory;  // of each device, if it is a GPU, because the GPU plugin does not report it
};

Topology::Topology(Plugin plugin, const std::string& name_and_options) {
  const std::string_view text = name_and_options, name = text.substr(0, text.find(','));
  const auto options = parse_options(text.substr(std::min(name.size() + 1, text.size())));
  if (name.starts_with(kOfCpu)) {
    expect_no_options(options, name);
    impl_ = std::make_shared<Impl>(cpus(std::move(plugin), name.substr(kOfCpu.size())));
  } else if (const auto gpus = gpu_topology(name)) {
    expect_no_options(options, name);
    impl_ = std::make_shared<Impl>(made_by(plugin, "", gpus->options), gpus->memory);
  } else {
    impl_ = std::make_shared<Impl>(made_by(plugin, name, options));
  }
}

std::string Topology::plugin_for(std::string_view name) {
  if (name.starts_with(kOfCpu)) return "cpu";
  if (gpu_topology(name.substr(0, name.find(',')))) return "cuda";
  const bool is_version = name.size() > 1 && name[0] == 'v' && name[1] >= '0' && name[1] <= '9';  // as in "v5p:4x4x8"
  return name.find(':') != std::string_view::npos && (is_version || name.starts_with("tpu")) ? "tpu" : "";
}

std::vector<DeviceDescription> Topology::devices() const {
  if (const auto* client = std::get_if<Client>(&impl_->of)) return client->devices();
  const auto& handle = std::get<TopologyHandle>(impl_->of);
  const auto all =
      handle.call("list a topology's devices", &PJRT_Api::PJRT_TopologyDescription_GetDeviceDescriptions, {.topology = handle.get()});
  std::vector<DeviceDescription> devices;
  for (size_t i = 0; i < all.num_descriptions; i++) {
    devices.push_back(describe(handle.api(), all.descriptions[i]));
    if (!devices.back().memory) devices.back().memory = impl_->memory;
  }
  return devices;
}

CompiledProgram Topology::compile(const Program& program, const CompileOptions& options) const {
  if (const auto* client = std::get_if<Client>(&impl_->of)) return client->compile(program, options).compiled();
  const auto& handle = std::get<TopologyHandle>(impl_->of);
  const PluginProgram text(program.text);
  const auto bytes = serialized(options);
  const auto compiled =
      handle.call("compile a program for a topology", &PJRT_Api::PJRT_Compile,
                  {.topology = handle.get(), .program = &text, .compile_options = bytes.data(), .compile_options_size = bytes.size()});
  return CompiledProgram(std::make_shared<CompiledProgram::Impl>(ProgramHandle(handle.api(), compiled.executable)));
}

}  // namespace tessera::pjrt
