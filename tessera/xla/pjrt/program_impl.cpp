#include "tessera/xla/pjrt/program_impl.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <functional>

#include "tessera/xla/pjrt/element_types.h"
#include "tessera/xla/pjrt/options.h"
#include "tessera/xla/pjrt/wire.h"

namespace tessera::pjrt {
namespace {

/// Returns the optimized program as the bytes of an HloModuleProto.
std::string optimized_module(const ProgramHandle& handle) {
  Padded<PJRT_Program> program;
  const auto ask = [&] {
    handle.call("show an optimized program", &PJRT_Api::PJRT_Executable_OptimizedProgram,
                {.executable = handle.get(), .program = &program});
  };
  ask();  // first for the size of the program
  std::string module(program.code_size, '\0');
  program.code = module.data();
  ask();
  if (std::string_view(program.format, program.format_size) != "hlo_with_config") return module;
  for (WireReader field(module); field.next();) {
    if (field.field() == 1) return std::string(field.bytes());
  }
  return {};
}

/// Calls `visit` with each instruction's operation and the shape of its result.
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

/// Bytes of an element, by XLA's number of its type: S16 is 3, S32 4, S64 5, U16 7, U32 8, U64 9, F16 10, F32 11, F64 12, C64 15, BF16 16
/// and C128 18.
int64_t bytes_of_type(uint64_t type) {
  constexpr int8_t kBytes[] = {1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 1, 1, 8, 2, 1, 16};
  return type < std::size(kBytes) ? kBytes[type] : 1;
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

int64_t ArrayType::bytes() const {
  return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(element));
}

std::string text_of(const ArrayType& type) {
  std::string text = "tensor<";
  for (const auto size : type.sizes) text += fmt::format("{}x", size);
  return fmt::format("{}{}>", text, element_name(type.element));
}

MemoryFigures CompiledProgram::memory() const {
  const auto stats =
      impl_->handle.call("report a program's memory", &PJRT_Api::PJRT_Executable_GetCompiledMemoryStats, {.executable = impl_->handle.get()});
  return {.arguments = stats.argument_size_in_bytes,
          .outputs = stats.output_size_in_bytes,
          .aliased = stats.alias_size_in_bytes,
          .temporary = stats.temp_size_in_bytes,
          .code = stats.generated_code_size_in_bytes,
          .peak = stats.peak_memory_in_bytes};
}

std::map<std::string, double> CompiledProgram::cost() const {
  Padded<PJRT_Executable_GetCostAnalysis_Args> arguments({.executable = impl_->handle.get()});
  std::map<std::string, double> cost;
  if (impl_->handle.api()->attempt(&PJRT_Api::PJRT_Executable_GetCostAnalysis, arguments)) return cost;
  for (const auto& [name, value] : from_named_values(arguments.properties, arguments.num_properties)) {
    const auto* const real = std::get_if<float>(&value);
    const bool is_of_one_operand = name.find('{') != std::string::npos;  // "name{...}"; some plugins have thousands of them
    if (real != nullptr && *real >= 0 && !is_of_one_operand) cost[name] = *real;
  }
  return cost;
}

std::map<std::string, int> CompiledProgram::operations() const {
  std::map<std::string, int> count;
  for_each_instruction(optimized_module(impl_->handle),
                       [&](const std::string& operation, std::string_view /*shape*/) { count[operation]++; });
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
  const auto made = impl_->handle.call("serialize a program", &PJRT_Api::PJRT_Executable_Serialize, {.executable = impl_->handle.get()});
  std::string bytes(made.serialized_bytes, made.serialized_bytes_size);
  made.serialized_executable_deleter(made.serialized_executable);
  return bytes;
}

std::vector<ArrayType> CompiledProgram::outputs() const {
  const auto& handle = impl_->handle;
  constexpr auto doing = "report a program's results";
  const auto types = handle.call(doing, &PJRT_Api::PJRT_Executable_OutputElementTypes, {.executable = handle.get()});
  const auto shapes = handle.call(doing, &PJRT_Api::PJRT_Executable_OutputDimensions, {.executable = handle.get()});
  std::vector<ArrayType> outputs;
  const auto* sizes = shapes.dims;
  for (size_t i = 0; i < shapes.num_outputs; i++) {
    outputs.push_back({scalar_type(types.output_types[i]), {sizes, sizes + shapes.dim_sizes[i]}});
    sizes += shapes.dim_sizes[i];
  }
  return outputs;
}

}  // namespace tessera::pjrt
