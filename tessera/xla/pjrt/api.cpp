#include "tessera/xla/pjrt/api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "tessera/base/error.h"

namespace tessera::pjrt {
namespace {

const PJRT_Api* table_of(const std::filesystem::path& file) {
  ::setenv("TF_CPP_MIN_LOG_LEVEL", "1", /*overwrite=*/0);  // keeps XLA's messages about its start off standard error
  // The library is never unloaded: its threads and registrations live as long as the process.
  void* const library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw ConfigError("the PJRT plugin {} can't be loaded: {}", file, ::dlerror());
  const auto get = reinterpret_cast<const PJRT_Api* (*)()>(::dlsym(library, "GetPjrtApi"));
  if (!get) throw ConfigError("{} is not a PJRT plugin: it has no function GetPjrtApi", file);
  const auto* const table = get();
  // The table must reach at least to the functions that read errors, because without them no failure could be reported.
  constexpr auto kLeast = offsetof(PJRT_Api, PJRT_Error_GetCode) + sizeof(void*);
  if (!table || table->struct_size < kLeast) throw ConfigError("{} is not a PJRT plugin: its table of functions is too short", file);
  if (table->pjrt_api_version.major_version != PJRT_API_MAJOR) {
    throw ConfigError("the PJRT plugin {} has version {}.{} of the interface; this program knows {}.x: install a plugin of such a version", file,
                      table->pjrt_api_version.major_version, table->pjrt_api_version.minor_version, PJRT_API_MAJOR);
  }
  return table;
}

}  // namespace

Api::Api(std::filesystem::path file) : file_(std::move(file)), table_(table_of(file_)) {
  // A plugin that is too old to have this function need not be started.
  if (has(&PJRT_Api::PJRT_Plugin_Initialize)) call("start the plugin", &PJRT_Api::PJRT_Plugin_Initialize);
}

std::shared_ptr<const Api> Api::load(const std::filesystem::path& file) {
  static auto& mutex = *new std::mutex;
  static auto& loaded = *new std::map<std::filesystem::path, std::shared_ptr<const Api>>;
  std::error_code missing;
  const auto path = std::filesystem::canonical(file, missing);
  if (missing)
    throw ConfigError("there is no PJRT plugin {}: {}; TESSERA_PJRT_PLUGIN takes cpu, tpu, cuda or the path of a library", file,
                      missing.message());
  const std::lock_guard lock(mutex);
  auto& api = loaded[path];
  if (!api) api.reset(new Api(path));
  return api;
}

std::string Api::version() const {
  return fmt::format("{}.{}", table_->pjrt_api_version.major_version, table_->pjrt_api_version.minor_version);
}

std::optional<Api::Failure> Api::failure(PJRT_Error* error) const {
  if (!error) return std::nullopt;
  Padded<PJRT_Error_Message_Args> message({.error = error});
  table_->PJRT_Error_Message(&message);
  Padded<PJRT_Error_GetCode_Args> code({.error = error});
  table_->PJRT_Error_GetCode(&code);
  Failure failure{code.code, {message.message, message.message_size}};
  Padded<PJRT_Error_Destroy_Args> destroy({.error = error});
  table_->PJRT_Error_Destroy(&destroy);
  return failure;
}

void Api::fail(const char* doing, const Failure& failure) const {
  throw Error("PJRT plugin {}: can't {}: {} [code {}]", file_.filename(), doing, failure.text, failure.code);
}

void wait(const std::shared_ptr<const Api>& api, PJRT_Event* event, const char* doing) {
  if (!event) return;
  const EventHandle owned(api, event);
  owned.call(doing, &PJRT_Api::PJRT_Event_Await, {.event = event});
}

DeviceDescription describe(const std::shared_ptr<const Api>& api, PJRT_DeviceDescription* device) {
  DeviceDescription described;
  constexpr auto doing = "describe a device";
  described.id = api->call(doing, &PJRT_Api::PJRT_DeviceDescription_Id, {.device_description = device}).id;
  const auto kind = api->call(doing, &PJRT_Api::PJRT_DeviceDescription_Kind, {.device_description = device});
  described.kind.assign(kind.device_kind, kind.device_kind_size);
  const auto attributes = api->call(doing, &PJRT_Api::PJRT_DeviceDescription_Attributes, {.device_description = device});
  described.attributes = from_named_values(attributes.attributes, attributes.num_attributes);
  const auto memory = described.attributes.find("device_memory_bytes_limit");
  if (memory != described.attributes.end()) {
    if (const auto* bytes = std::get_if<int64_t>(&memory->second)) described.memory = *bytes;
  }
  return described;
}

}  // namespace tessera::pjrt
