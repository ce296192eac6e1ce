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
  /// A buffer without memory on a device, for programs that are only traced. Its download gives zeros.
  static Buffer absent(ArrayType type);

  explicit operator bool() const { return impl_ != nullptr; }
  bool operator==(const Buffer&) const = default;

  const ArrayType& type() const;
  int device() const;
  /// Whether a program has taken the buffer's memory for a result; the buffer can't be used then.
  bool is_donated() const;
  /// Whether wait() would return at once.
  bool is_ready() const;
  /// Waits until the buffer's values are computed. Throws Error if the program that should have computed them failed.
  void wait() const;
  /// Copies the buffer's values into a new tensor on the CPU.
  at::Tensor download() const;

 private:
  friend class Executable;
  std::shared_ptr<const Impl> impl_;
};

/// A compiled program that is loaded on devices, with one replica on each. Copies are the same program.
class Executable {
 public:
  class Impl;
  explicit Executable(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

  CompiledProgram compiled() const;
  int replicas() const;
  /// Starts all replicas. Returns for each replica a list of results, which may not be computed yet. Throws UsageError, and starts no
  /// replica, if an argument is missing, of a wrong type, on a wrong device, was donated before, or is donated and used twice.
  std::vector<std::vector<Buffer>> run(std::span<const std::vector<Buffer>> arguments) const;

 private:
  std::shared_ptr<const Impl> impl_;
};

/// The most devices of a client. A CPU plugin starts threads for each device: a host can run a few hundred such devices, and for a mistyped
/// number the plugin would start threads for ever.
inline constexpr int kMostDevices = 1024;

struct ClientOptions {
  /// How many devices a CPU plugin makes. For other plugins, how many devices the host must have at least. At most kMostDevices.
  int devices = 1;
  Options plugin_options = {};
};

/// The devices of a plugin in this process. Copies are the same client.
class Client {
 public:
  class Impl;
  explicit Client(Plugin plugin, const ClientOptions& options = {});

  const Plugin& plugin() const;
  /// The kind of devices, such as "cpu".
  std::string platform() const;
  std::vector<DeviceDescription> devices() const;

  /// Copies a dense CPU tensor to a device.
  Buffer upload(const at::Tensor& tensor, int device) const;

  Executable compile(const Program& program, CompileOptions options = {}) const;
  /// Loads a program from the bytes that CompiledProgram::serialized() made of it. Returns nothing if the plugin refuses the bytes.
  std::optional<Executable> load(std::string_view serialized, const Program& program, const CompileOptions& options = {}) const;

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::pjrt
