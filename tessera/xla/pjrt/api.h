// Calls the functions of a PJRT plugin, and throws the plugin's errors as exceptions.
#pragma once

#include <pjrt_c_api.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "tessera/xla/pjrt/device.h"

// Callers set only some fields of PJRT's argument structs; the others are zero.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace tessera::pjrt {

/// The argument struct of a PJRT function, with zeros in the fields that are not given. `struct_size` is larger than the struct in our
/// header: the struct of a newer plugin has more fields, and a plugin refuses a struct that is smaller than its own.
template <class Args>
struct Padded : Args {
  explicit Padded(const Args& given = {}) : Args(given) {
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(static_cast<Args*>(this));  // a newer plugin may have fields in the padding
#endif
    this->struct_size = sizeof(Args) + sizeof newer_fields / 2;
  }
  char newer_fields[256] = {};
};

class Api {
 public:
  /// Loads a plugin's library, or returns it if this process has loaded it before.
  static std::shared_ptr<const Api> load(const std::filesystem::path& file);

  template <class Args>
  using Function = PJRT_Error* (*PJRT_Api::*)(Args*);

  struct Failure {
    int code;
    std::string text;
  };

  /// Calls a function. Returns the plugin's failure, or nothing if the call succeeded.
  template <class Args>
  std::optional<Failure> attempt(Function<Args> function, std::type_identity_t<Args>& arguments) const {
    if (!has(function)) return Failure{PJRT_Error_Code_UNIMPLEMENTED, "this plugin is too old to have the function"};
    return failure((table_->*function)(&arguments));
  }
  /// Calls a function and returns its arguments, of which some are results. Throws Error with the plugin's text if it fails. `doing` says
  /// what was tried: "compile a program".
  template <class Args>
  Args call(const char* doing, Function<Args> function, const std::type_identity_t<Args>& given = {}) const {
    Padded<Args> arguments(given);
    if (const auto failed = attempt(function, arguments)) fail(doing, *failed);
    return arguments;
  }
  /// Reads and destroys an error, which may be null.
  std::optional<Failure> failure(PJRT_Error* error) const;
  [[noreturn]] void fail(const char* doing, const Failure& failure) const;

  const std::filesystem::path& file() const { return file_; }
  /// The version of the PJRT interface that the plugin was built with, such as "0.81".
  std::string version() const;

 private:
  explicit Api(std::filesystem::path file);

  /// Whether the plugin has the function: the table of a plugin that is older than our header may end before it.
  template <class Args>
  bool has(Function<Args> function) const {
    const auto offset = reinterpret_cast<const char*>(&(table_->*function)) - reinterpret_cast<const char*>(table_);
    return static_cast<size_t>(offset) + sizeof(void*) <= table_->struct_size && table_->*function != nullptr;
  }
  std::filesystem::path file_;
  const PJRT_Api* table_ = nullptr;
};

/// Owns an object of the plugin, and destroys it by the function `destroy`.
template <class T, class Args, T* Args::* field, Api::Function<Args> destroy>
class Handle {
 public:
  Handle() = default;
  Handle(std::shared_ptr<const Api> api, T* object) : api_(std::move(api)), object_(object) {}
  Handle(Handle&& other) noexcept : api_(std::move(other.api_)), object_(std::exchange(other.object_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(object_, other.object_);
    return *this;
  }
  ~Handle() {
    if (!object_) return;
    Padded<Args> arguments;
    arguments.*field = object_;
    (void)api_->attempt(destroy, arguments);
  }

  T* get() const { return object_; }
  const std::shared_ptr<const Api>& api() const { return api_; }

  /// Calls a function of this object. `given` must name the object, too.
  template <class OtherArgs>
  OtherArgs call(const char* doing, Api::Function<OtherArgs> function, const std::type_identity_t<OtherArgs>& given) const {
    return api_->call(doing, function, given);
  }

 private:
  std::shared_ptr<const Api> api_;
  T* object_ = nullptr;
};

using EventHandle = Handle<PJRT_Event, PJRT_Event_Destroy_Args, &PJRT_Event_Destroy_Args::event, &PJRT_Api::PJRT_Event_Destroy>;
using ClientHandle = Handle<PJRT_Client, PJRT_Client_Destroy_Args, &PJRT_Client_Destroy_Args::client, &PJRT_Api::PJRT_Client_Destroy>;
using BufferHandle = Handle<PJRT_Buffer, PJRT_Buffer_Destroy_Args, &PJRT_Buffer_Destroy_Args::buffer, &PJRT_Api::PJRT_Buffer_Destroy>;
using ProgramHandle =
    Handle<PJRT_Executable, PJRT_Executable_Destroy_Args, &PJRT_Executable_Destroy_Args::executable, &PJRT_Api::PJRT_Executable_Destroy>;
using LoadedHandle = Handle<PJRT_LoadedExecutable, PJRT_LoadedExecutable_Destroy_Args, &PJRT_LoadedExecutable_Destroy_Args::executable,
                            &PJRT_Api::PJRT_LoadedExecutable_Destroy>;
using TopologyHandle = Handle<PJRT_TopologyDescription, PJRT_TopologyDescription_Destroy_Args,
                              &PJRT_TopologyDescription_Destroy_Args::topology, &PJRT_Api::PJRT_TopologyDescription_Destroy>;

/// Waits for the event, which may be null, and destroys it. Throws Error if the operation that the event signals has failed.
void wait(const std::shared_ptr<const Api>& api, PJRT_Event* event, const char* doing);

DeviceDescription describe(const std::shared_ptr<const Api>& api, PJRT_DeviceDescription* device);

}  // namespace tessera::pjrt
