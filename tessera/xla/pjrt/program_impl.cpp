#include "tessera/xla/pjrt/program_impl.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <functional>

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

/// `visit` gets each instruction's operation and the shape of its result.
void for_each_instruction(std::string_view module, const std::function<void(const std::string& operation, std::string_view shape)>& visit) {
  for (WireReader computation(module); computation.next();) {
    if (computation.field() != 3) continue;
    for (WireReader instruction(computation.bytes()); instruction.next();) {
      if (instruction.field() != 2) continue;
      std::string operation;
      std::string_view shape;
      for (WireReader detail(instruction.bytes()); detail.next();) {
        if (detail.field() == 2) operation = detail.bytes();
        if (detail.field() == 3) shape = detail.bytes();
      }
      visit(operation, shape);
    }
  }
}

/// The shapes of a tuple's elements; empty for other shapes.
std::vector<std::string_view> parts_of(std::string_view shape) {
  std::vector<std::string_view> parts;
  for (WireReader field(shape); field.next();) {
    if (field.field() == 4) parts.push_back(field.bytes());
  }
  return parts;
}

/// Bytes of an element, by XLA's number of its type.
int64_t bytes_of_type(uint64_t type) {
  switch (type) {
    case 3:   // S16
    case 7:   // U16
    case 10:  // F16
    case 16:  // BF16
      return 2;
    case 4:   // S32
    case 8:   // U32
    case 11:  // F32
      return 4;
    case 5:   // S64
    case 9:   // U64
    case 12:  // F64
    case 15:  // C64
      return 8;
    case 18:  // C128
      return 16;
    default:
      return 1;
  }
}

int64_t bytes_of(std::string_view shape) {
  int64_t elements = 1, in_parts = 0;
  uint64_t type = 0;
  for (WireReader field(shape); field.next();) {
    if (field.field() == 2) type = field.number();
    if (field.field() == 3 && field.bytes().empty()) elements *= static_cast<int64_t>(field.number());
    if (field.field() == 3 && !field.bytes().empty()) {
      for (WireReader sizes(field.bytes()); sizes.next_packed();) elements *= static_cast<int64_t>(sizes.number());
    }
    if (field.field() == 4) in_parts += bytes_of(field.bytes());
  }
  constexpr uint64_t kTuple = 13;
  return type == kTuple ? in_parts : elements * bytes_of_type(type);
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
    const auto* const real = std::get_if<float>(&value);
    const bool is_of_one_operand = name.find('{') != std::string::npos;  // some plugins have thousands of these
    if (real != nullptr && *real >= 0 && !is_of_one_operand) cost[name] = *real;
  }
  return cost;
}

std::map<std::string, int> CompiledProgram::operations() const {
  std::map<std::string, int> count;
  for_each_instruction(optimized_module(impl_->handle), [&](const std::string& operation, std::string_view /*shape*/) { count[operation]++; });
  return count;
}

std::map<std::string, Collectives> CompiledProgram::collectives() const {
  std::map<std::string, Collectives> all;
  for_each_instruction(optimized_module(impl_->handle), [&](const std::string& operation, std::string_view shape) {
    for (const auto* name : {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}) {
      // An asynchronous collective begins with a -start instruction, whose tuple may have the operands before the results.
      const bool starts = operation == std::string(name) + "-start";
      if (!starts && operation != name) continue;
      const auto parts = parts_of(shape);
      all[name].count++;
      all[name].bytes += starts && parts.size() == 2 ? bytes_of(parts[1]) : bytes_of(shape);
    }
  });
  return all;
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
