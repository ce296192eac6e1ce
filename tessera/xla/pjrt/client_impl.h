// The plugin's objects that a client, its buffers and its programs own. For sources of this folder only.
#pragma once

#include <mutex>

#include "tessera/xla/pjrt/api.h"
#include "tessera/xla/pjrt/client.h"
#include "tessera/xla/pjrt/program_impl.h"

namespace tessera::pjrt {

class Client::Impl {
 public:
  Impl(Plugin plugin, const ClientOptions& options);

  Plugin plugin;
  ClientHandle handle;
  std::vector<PJRT_Device*> devices;
  /// Whether XLA removes optimization barriers before it merges equal operations. Client::compile() finds out by compiling a small program,
  /// before it compiles the first program with a barrier.
  std::once_flag barriers_are_known;
  bool barriers_are_undone = false;
};

class Buffer::Impl {
 public:
  Impl(std::shared_ptr<const Client::Impl> client, PJRT_Buffer* buffer, ArrayType type, int device)
      : client(std::move(client)), handle(this->client->handle.api(), buffer), type(std::move(type)), device(device) {}
  explicit Impl(ArrayType type) : type(std::move(type)) {}

  std::shared_ptr<const Client::Impl> client;  // so that the client outlives the buffer
  BufferHandle handle;                         // null if the buffer is absent
  ArrayType type;
  int device = 0;
};

class Executable::Impl {
 public:
  Impl(std::shared_ptr<const Client::Impl> client, PJRT_LoadedExecutable* loaded, std::vector<Parameter> parameters, int replicas);

  std::shared_ptr<const Client::Impl> client;
  LoadedHandle handle;
  std::vector<Parameter> parameters;
  int replicas;
  std::shared_ptr<const CompiledProgram::Impl> compiled;
  std::vector<ArrayType> outputs;
};

}  // namespace tessera::pjrt
