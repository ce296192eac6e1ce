// The devices of one plugin in this process, their memory, and the programs that run on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/xla/pjrt/device.h"
#include "tessera/xla/pjrt/options.h"
#include "tessera/xla/pjrt/plugin.h"
#include "tessera/xla/pjrt/program.h"

namespace tessera::pjrt {

/// An array in a device's memory. Copies are the same array.
class Buffer {
 public:
  class Impl;
  Buffer() = default;
  explicit Buffer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  /// A buffer in the memory of no device: its download gives zeros.
  static Buffer absent(ArrayType type);

  explicit operator bool() const { return impl_ != nullptr; }
  bool operator==(const Buffer&) const = default;

  const ArrayType& type() const;
  int device() const;
  /// Whether a program has reused its memory for a result.
  bool is_donated() const;
  /// Whether wait() would return at once.
  bool is_ready() const;
  /// Waits until it has its values. Throws Error if the program that should have made them failed.
  void wait() const;
  /// Copies its values into a new tensor on the CPU.
  at::Tensor download() const;

 private:
  friend class Executable;
  std::shared_ptr<const Impl> impl_;
};

/// A program that its compiler has put on devices, one replica each. Copies are the same.
class Executable {
 public:
  class Impl;
  explicit Executable(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  CompiledProgram compiled() const;
  int replicas() const;
  /// Starts all replicas and returns their results, a list for each replica, which may still be computed. Throws UsageError, and starts
  /// none, if arguments are missing, of a wrong type, on a wrong device, donated before, or donated and used twice.
  std::vector<std::vector<Buffer>> run(std::span<const std::vector<Buffer>> arguments) const;

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Each device of a CPU plugin has threads of its own: a host runs some hundred at most, and a mistyped number would make them for ever.
inline constexpr int kMostDevices = 1024;

struct ClientOptions {
  /// How many devices a CPU plugin shall show, at most kMostDevices. Other plugins have as many as there are.
  int devices = 1;
  Options plugin_options = {};
};

/// Copies are the same client.
class Client {
 public:
  class Impl;
  explicit Client(Plugin plugin, const ClientOptions& options = {});

  const Plugin& plugin() const;
  /// Such as "cpu".
  std::string platform() const;
  std::vector<DeviceDescription> devices() const;

  /// Copies a dense CPU tensor to a device.
  Buffer upload(const at::Tensor& tensor, int device) const;

  Executable compile(const Program& program, CompileOptions options = {}) const;
  /// Loads what CompiledProgram::serialized() has written of the same program. Returns nothing if the plugin does not take it.
  std::optional<Executable> load(std::string_view serialized, const Program& program, const CompileOptions& options = {}) const;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::pjrt
