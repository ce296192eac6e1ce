// The plugin's object behind a compiled program. For sources of this folder only.
#pragma once

#include "tessera/xla/pjrt/api.h"
#include "tessera/xla/pjrt/program.h"

namespace tessera::pjrt {

class CompiledProgram::Impl {
 public:
  explicit Impl(ProgramHandle handle) : handle(std::move(handle)) {}
  ProgramHandle handle;
};

/// A program as clients and topologies hand it to their compilers.
struct PluginProgram : Padded<PJRT_Program> {
  // The text is read only, but the plugin writes through the same struct elsewhere.
  explicit PluginProgram(const std::string& text)
      : Padded({.code = const_cast<char*>(text.data()), .code_size = text.size(), .format = "mlir", .format_size = 4}) {}
};

}  // namespace tessera::pjrt
