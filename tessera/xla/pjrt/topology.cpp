#include "tessera/xla/pjrt/topology.h"

#include "tessera/xla/pjrt/program_impl.h"

namespace tessera::pjrt {

class Topology::Impl {
 public:
  explicit Impl(TopologyHandle handle) : handle(std::move(handle)) {}
  TopologyHandle handle;
};

Topology::Topology(Plugin plugin, const std::string& name_and_options) {
  const auto comma = std::min(name_and_options.find(','), name_and_options.size());
  const auto options = parse_options(std::string_view(name_and_options).substr(std::min(comma + 1, name_and_options.size())));
  const NamedValues values(options);
  Padded<PJRT_TopologyDescription_Create_Args> arguments;
  arguments.topology_name = name_and_options.data();
  arguments.topology_name_size = comma;
  arguments.create_options = values.data();
  arguments.num_options = values.size();
  plugin.api()->call<PJRT_TopologyDescription_Create_Args>("make a topology", &PJRT_Api::PJRT_TopologyDescription_Create, arguments);
  impl_ = std::make_shared<Impl>(TopologyHandle(plugin.api(), arguments.topology));
}

std::vector<DeviceDescription> Topology::devices() const {
  Padded<PJRT_TopologyDescription_GetDeviceDescriptions_Args> arguments;
  arguments.topology = impl_->handle.get();
  impl_->handle.call<PJRT_TopologyDescription_GetDeviceDescriptions_Args>("list a topology's devices",
                                                                          &PJRT_Api::PJRT_TopologyDescription_GetDeviceDescriptions, arguments);
  std::vector<DeviceDescription> devices;
  for (size_t i = 0; i < arguments.num_descriptions; i++) devices.push_back(describe(impl_->handle.api(), arguments.descriptions[i]));
  return devices;
}

CompiledProgram Topology::compile(const Program& program, const CompileOptions& options) const {
  PluginProgram text(program.text);
  const auto bytes = serialized(options);
  Padded<PJRT_Compile_Args> arguments;
  arguments.topology = impl_->handle.get();
  arguments.program = &text;
  arguments.compile_options = bytes.data();
  arguments.compile_options_size = bytes.size();
  impl_->handle.call<PJRT_Compile_Args>("compile a program for a topology", &PJRT_Api::PJRT_Compile, arguments);
  return CompiledProgram(std::make_shared<CompiledProgram::Impl>(ProgramHandle(impl_->handle.api(), arguments.executable)));
}

}  // namespace tessera::pjrt
