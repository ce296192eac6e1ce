// The plugin's object that a compiled program owns. For sources of this folder only.
#pragma once

#include "tessera/xla/pjrt/api.h"
#include "tessera/xla/pjrt/program.h"

namespace tessera::pjrt {

class CompiledProgram::Impl {
 public:
  explicit Impl(ProgramHandle handle) : handle(std::move(handle)) {}
  ProgramHandle handle;
};

/// A program in the form that PJRT_Client_Compile and PJRT_Compile take.
struct PluginProgram : Padded<PJRT_Program> {
  // Compilers only read the text. It is not const in PJRT's struct, because OptimizedProgram writes through the same struct.
  explicit PluginProgram(const std::string& text)
      : Padded({.code = const_cast<char*>(text.data()), .code_size = text.size(), .format = "mlir", .format_size = 4}) {}
};

}  // namespace tessera::pjrt
