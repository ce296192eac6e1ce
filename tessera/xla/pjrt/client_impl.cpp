#include "tessera/xla/pjrt/client_impl.h"

#include <thread>

#include "tessera/base/error.h"
#include "tessera/xla/pjrt/element_types.h"

namespace tessera::pjrt {
namespace {

ClientHandle make_client(const Plugin& plugin, const ClientOptions& options) {
  constexpr auto kDevices = "cpu_device_count";
  if (options.devices < 1) throw UsageError("a client can't have {} devices: ask for one or more", options.devices);
  if (options.devices > kMostDevices)
    throw UsageError("{} devices are asked for, and no client has more than {}", options.devices, kMostDevices);
  Padded<PJRT_Client_Create_Args> arguments;
  const auto failed_with = [&](const Options& named) {
    const auto values = named_values(named);
    arguments.create_options = values.data();
    arguments.num_options = values.size();
    return plugin.api()->attempt(&PJRT_Api::PJRT_Client_Create, arguments);
  };
  auto given = options.plugin_options;
  // By default, the GPU plugin takes three quarters of the memory at once, but libtorch or another process may need some of it.
  if (plugin.file().filename() == "xla_cuda_plugin.so") given.try_emplace("preallocate", false);
  auto named = given;
  named.try_emplace(kDevices, int64_t{options.devices});
  auto failed = failed_with(named);
  // Only CPU plugins take a number of devices. Other plugins refuse the option, so they are started without it, with all devices of the
  // host.
  if (failed && failed->text.find(kDevices) != std::string::npos) failed = failed_with(given);
  if (failed) plugin.api()->fail("start its devices", *failed);
  return {plugin.api(), arguments.client};
}

PJRT_LoadedExecutable* compile(const ClientHandle& client, const std::string& text, const CompileOptions& options) {
  const PluginProgram program(text);
  const auto bytes = serialized(options);
  const auto compiled =
      client.call("compile a program", &PJRT_Api::PJRT_Client_Compile,
                  {.client = client.get(), .program = &program, .compile_options = bytes.data(), .compile_options_size = bytes.size()});
  return compiled.executable;
}

/// Whether the compiler merges two equal operations although one of them reads a result of a barrier.
bool barriers_are_undone(const std::shared_ptr<const Client::Impl>& client) {
  constexpr auto text = R"(module { func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
    %a = "stablehlo.cosine"(%x) : (tensor<8xf32>) -> tensor<8xf32>
    %b:2 = "stablehlo.optimization_barrier"(%x, %a) : (tensor<8xf32>, tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>)
    %c = "stablehlo.cosine"(%b#0) : (tensor<8xf32>) -> tensor<8xf32>
    %d = "stablehlo.multiply"(%b#1, %c) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
    return %d : tensor<8xf32>
  } })";
  const Executable::Impl probe(client, compile(client->handle, text, {}), {}, 1);
  const auto operations = CompiledProgram(probe.compiled).operations();
  const auto cosines = operations.find("cosine");
  return cosines != operations.end() && cosines->second == 1;
}

std::shared_ptr<const CompiledProgram::Impl> compiled_program(const LoadedHandle& loaded) {
  const auto program =
      loaded.call("describe a program", &PJRT_Api::PJRT_LoadedExecutable_GetExecutable, {.loaded_executable = loaded.get()});
  return std::make_shared<CompiledProgram::Impl>(ProgramHandle(loaded.api(), program.executable));
}

/// Turns off kernels that use XLA's thread pool. A replica that waits in a collective may hold a thread of the pool for which another
/// replica waits: both would wait for ever, and after a minute the plugin ends the process.
void keep_out_of_the_pool(CompileOptions& options) {
  if (options.replicas == 1) return;
  options.overrides.try_emplace("xla_cpu_use_xnnpack", false);
  // If there are as many replicas as cores, they keep all cores busy without multi-threaded Eigen.
  if (options.replicas >= static_cast<int>(std::thread::hardware_concurrency()))
    options.overrides.try_emplace("xla_cpu_multi_thread_eigen", false);
}

}  // namespace

Client::Impl::Impl(Plugin which, const ClientOptions& options) : plugin(std::move(which)), handle(make_client(plugin, options)) {
  const auto all = handle.call("list its devices", &PJRT_Api::PJRT_Client_AddressableDevices, {.client = handle.get()});
  devices.assign(all.addressable_devices, all.addressable_devices + all.num_addressable_devices);
  if (static_cast<int>(devices.size()) < options.devices) {
    throw ConfigError("{} devices are asked for, but the PJRT plugin {} has only {}", options.devices, plugin.file().filename(), devices.size());
  }
}

Client::Client(Plugin plugin, const ClientOptions& options) : impl_(std::make_shared<Impl>(std::move(plugin), options)) {}

const Plugin& Client::plugin() const {
  return impl_->plugin;
}

std::string Client::platform() const {
  const auto name = impl_->handle.call("name its kind of devices", &PJRT_Api::PJRT_Client_PlatformName, {.client = impl_->handle.get()});
  return {name.platform_name, name.platform_name_size};
}

std::vector<DeviceDescription> Client::devices() const {
  std::vector<DeviceDescription> all;
  for (auto* const device : impl_->devices) {
    const auto& api = impl_->handle.api();
    const auto description = api->call("describe a device", &PJRT_Api::PJRT_Device_GetDescription, {.device = device}).device_description;
    auto& described = all.emplace_back(describe(api, description));
    Padded<PJRT_Device_MemoryStats_Args> memory({.device = device});
    if (api->attempt(&PJRT_Api::PJRT_Device_MemoryStats, memory)) continue;  // the plugin does not count memory
    if (memory.bytes_limit_is_set) described.memory = memory.bytes_limit;
    if (memory.peak_bytes_in_use_is_set) described.peak_memory = memory.peak_bytes_in_use;
  }
  return all;
}

Buffer Client::upload(const at::Tensor& tensor, int device) const {
  if (!tensor.device().is_cpu()) throw UsageError("only CPU tensors can be uploaded, but this one is on {}: copy it to the CPU first", tensor.device().str());
  if (device < 0 || device >= static_cast<int>(impl_->devices.size())) {
    throw UsageError("there is no device {}: the last device is {}", device, impl_->devices.size() - 1);
  }
  const auto dense = tensor.contiguous();
  ArrayType type{dense.scalar_type(), dense.sizes().vec()};
  constexpr auto doing = "upload a tensor";
  const auto& api = impl_->handle.api();
  const auto copy = api->call(doing, &PJRT_Api::PJRT_Client_BufferFromHostBuffer,
                              {.client = impl_->handle.get(),
                               .data = dense.const_data_ptr(),
                               .type = static_cast<PJRT_Buffer_Type>(element_type(type.element)),
                               .dims = type.sizes.data(),
                               .num_dims = type.sizes.size(),
                               .host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall,
                               .device = impl_->devices[static_cast<size_t>(device)]});
  Buffer buffer(std::make_shared<Buffer::Impl>(impl_, copy.buffer, std::move(type), device));
  wait(api, copy.done_with_host_buffer, doing);
  return buffer;
}

Executable Client::compile(const Program& program, CompileOptions options) const {
  const bool is_cpu = platform() == "cpu";
  if (is_cpu) {
    keep_out_of_the_pool(options);
    options.overrides.try_emplace("xla_cpu_enable_fast_min_max", false);  // else the maximum of a number and NaN would be the number
  }
  if (is_cpu && program.text.find("optimization_barrier") != std::string::npos) {
    std::call_once(impl_->barriers_are_known, [this] { impl_->barriers_are_undone = barriers_are_undone(impl_); });
    if (impl_->barriers_are_undone) options.overrides.try_emplace("xla_disable_hlo_passes", "cse_barrier_expander");
  }
  if (options.replicas > static_cast<int>(impl_->devices.size())) {
    throw UsageError("a program for {} replicas can't be put on {} devices", options.replicas, impl_->devices.size());
  }
  return Executable(
      std::make_shared<Executable::Impl>(impl_, pjrt::compile(impl_->handle, program.text, options), program.parameters, options.replicas));
}

std::optional<Executable> Client::load(std::string_view serialized_program, const Program& program, const CompileOptions& options) const {
  Padded<PJRT_Executable_DeserializeAndLoad_Args> arguments({.client = impl_->handle.get(),
                                                             .serialized_executable = serialized_program.data(),
                                                             .serialized_executable_size = serialized_program.size()});
  if (impl_->handle.api()->attempt(&PJRT_Api::PJRT_Executable_DeserializeAndLoad, arguments)) return std::nullopt;
  return Executable(std::make_shared<Executable::Impl>(impl_, arguments.loaded_executable, program.parameters, options.replicas));
}

Executable::Impl::Impl(std::shared_ptr<const Client::Impl> of, PJRT_LoadedExecutable* loaded, std::vector<Parameter> parameters,
                       int replicas)
    : client(std::move(of)),
      handle(client->handle.api(), loaded),
      parameters(std::move(parameters)),
      replicas(replicas),
      compiled(compiled_program(handle)),
      outputs(CompiledProgram(compiled).outputs()) {}

}  // namespace tessera::pjrt
