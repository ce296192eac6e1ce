#include "tessera/xla/pjrt/program_impl.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include "tessera/xla/pjrt/element_types.h"
#include "tessera/xla/pjrt/options.h"
#include "tessera/xla/pjrt/wire.h"

namespace tessera::pjrt {
namespace {

/// The program as the compiler has left it, as an HloModuleProto.
std::string optimized_module(const ProgramHandle& handle) {
  Padded<PJRT_Program> program;
  Padded<PJRT_Executable_OptimizedProgram_Args> arguments;
  arguments.executable = handle.get();
  arguments.program = &program;
  const auto ask = [&] {
    handle.call<PJRT_Executable_OptimizedProgram_Args>("show an optimized program", &PJRT_Api::PJRT_Executable_OptimizedProgram, arguments);
  };
  ask();  // first for its size
  std::string module(program.code_size, '\0');
  program.code = module.data();
  ask();
  if (std::string_view(program.format, program.format_size) != "hlo_with_config") return module;
  for (WireReader field(module); field.next();) {
    if (field.field() == 1) return std::string(field.bytes());
  }
  return {};
}

}  // namespace

int64_t ArrayType::bytes() const { return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(element)); }

std::string text_of(const ArrayType& type) {
  std::string text = "tensor<";
  for (const auto size : type.sizes) text += fmt::format("{}x", size);
  return fmt::format("{}{}>", text, element_name(type.element));
}

MemoryFigures CompiledProgram::memory() const {
  Padded<PJRT_Executable_GetCompiledMemoryStats_Args> stats;
  stats.executable = impl_->handle.get();
  impl_->handle.call<PJRT_Executable_GetCompiledMemoryStats_Args>("tell a program's memory", &PJRT_Api::PJRT_Executable_GetCompiledMemoryStats,
                                                                  stats);
  return {.arguments = stats.argument_size_in_bytes,
          .outputs = stats.output_size_in_bytes,
          .aliased = stats.alias_size_in_bytes,
          .temporary = stats.temp_size_in_bytes,
          .code = stats.generated_code_size_in_bytes,
          .peak = stats.peak_memory_in_bytes};
}

std::map<std::string, double> CompiledProgram::cost() const {
  Padded<PJRT_Executable_GetCostAnalysis_Args> arguments;
  arguments.executable = impl_->handle.get();
  std::map<std::string, double> cost;
  if (impl_->handle.api()->attempt<PJRT_Executable_GetCostAnalysis_Args>(&PJRT_Api::PJRT_Executable_GetCostAnalysis, arguments)) return cost;
  for (const auto& [name, value] : from_named_values(arguments.properties, arguments.num_properties)) {
    if (const auto* real = std::get_if<float>(&value)) cost[name] = *real;
  }
  return cost;
}

std::map<std::string, int> CompiledProgram::operations() const {
  std::map<std::string, int> count;
  const auto module = optimized_module(impl_->handle);
  for (WireReader computation(module); computation.next();) {
    if (computation.field() != 3) continue;
    for (WireReader instruction(computation.bytes()); instruction.next();) {
      if (instruction.field() != 2) continue;
      for (WireReader detail(instruction.bytes()); detail.next();) {
        if (detail.field() == 2) count[std::string(detail.bytes())]++;
      }
    }
  }
  return count;
}

std::string CompiledProgram::serialized() const {
  Padded<PJRT_Executable_Serialize_Args> arguments;
  arguments.executable = impl_->handle.get();
  impl_->handle.call<PJRT_Executable_Serialize_Args>("serialize a program", &PJRT_Api::PJRT_Executable_Serialize, arguments);
  std::string bytes(arguments.serialized_bytes, arguments.serialized_bytes_size);
  arguments.serialized_executable_deleter(arguments.serialized_executable);
  return bytes;
}

std::vector<ArrayType> CompiledProgram::outputs() const {
  const auto& handle = impl_->handle;
  Padded<PJRT_Executable_OutputElementTypes_Args> types;
  types.executable = handle.get();
  handle.call<PJRT_Executable_OutputElementTypes_Args>("tell a program's results", &PJRT_Api::PJRT_Executable_OutputElementTypes, types);
  Padded<PJRT_Executable_OutputDimensions_Args> shapes;
  shapes.executable = handle.get();
  handle.call<PJRT_Executable_OutputDimensions_Args>("tell a program's results", &PJRT_Api::PJRT_Executable_OutputDimensions, shapes);
  std::vector<ArrayType> outputs;
  const auto* sizes = shapes.dims;
  for (size_t i = 0; i < shapes.num_outputs; i++) {
    outputs.push_back({scalar_type(types.output_types[i]), {sizes, sizes + shapes.dim_sizes[i]}});
    sizes += shapes.dim_sizes[i];
  }
  return outputs;
}

}  // namespace tessera::pjrt
