#include "tessera/xla/pjrt/program_cache.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <fstream>
#include <mutex>
#include <random>

#include "tessera/base/atomic_write.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/log.h"

namespace tessera::pjrt {
namespace {

uint64_t hash_of_plugin(const std::filesystem::path& file) {
  static std::mutex mutex;
  static auto& hashes = *new std::map<std::filesystem::path, uint64_t>;
  const std::lock_guard lock(mutex);
  const auto [known, is_new] = hashes.try_emplace(file);
  if (is_new) {
    const InputFile input(file);
    std::string part(size_t{1} << 22, '\0');
    for (uint64_t offset = 0; offset < input.size(); offset += part.size()) {
      const auto count = std::min<uint64_t>(part.size(), input.size() - offset);
      input.read(part.data(), count, offset);
      known->second = XXH3_64bits_withSeed(part.data(), count, known->second);
    }
  }
  return known->second;
}

/// The processor's model and features, which decide the code that a CPU compiler makes.
std::string processor() {
  std::ifstream lines("/proc/cpuinfo");
  std::string all;
  for (std::string line; std::getline(lines, line) && !line.empty();) {
    if (line.starts_with("model name") || line.starts_with("flags") || line.starts_with("Features")) all += line;
  }
  return all;
}

std::string key_of(const Plugin& plugin, const std::vector<DeviceDescription>& devices, const Program& program, const CompileOptions& options) {
  static const auto this_processor = processor();
  const auto kind = devices.empty() ? std::string() : devices.front().kind;
  const auto known = fmt::format("{}\n{} of {}\n{}\n{}\n{}\n", hash_of_plugin(plugin.file()), devices.size(), kind, kind == "cpu" ? this_processor : "",
                                 env("XLA_FLAGS").value_or(""), serialized(options)) +
                     program.text;
  const auto hash = XXH3_128bits(known.data(), known.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

/// Makes the header of a cached file, by which program_in() refuses another program's code and damaged code: such code could end the
/// process.
std::string header_of(const std::string& key, std::string_view bytes) {
  return fmt::format("{}{:016x}", key, XXH3_64bits(bytes.data(), bytes.size()));
}

/// Reads a cached program; returns nothing if the file has another program or is damaged.
std::optional<std::string> program_in(const std::filesystem::path& file, const std::string& key) {
  auto bytes = InputFile(file).read_all();
  const auto length = header_of(key, {}).size();
  if (bytes.size() < length) return {};
  const auto header = bytes.substr(0, length);
  bytes.erase(0, length);
  return header == header_of(key, bytes) ? std::optional(std::move(bytes)) : std::nullopt;
}

void warn_once(const Error& error) {
  static std::once_flag once;
  std::call_once(once, [&] {
    log(LogLevel::Warning, "compiled programs are not kept on disk: {}; set TESSERA_XLA_CACHE to another folder, or to 'none'", error.what());
  });
}

}  // namespace

std::optional<ProgramCache> ProgramCache::of_this_user() {
  if (const auto folder = env("TESSERA_XLA_CACHE")) return *folder == "none" ? std::nullopt : std::optional<ProgramCache>(*folder);
  if (const auto caches = env("XDG_CACHE_HOME")) return ProgramCache(std::filesystem::path(*caches) / "tessera" / "xla");
  if (const auto home = env("HOME")) return ProgramCache(std::filesystem::path(*home) / ".cache" / "tessera" / "xla");
  return std::nullopt;
}

ProgramCache::Found ProgramCache::compile(const Client& client, const Program& program, const CompileOptions& options) const {
  const auto key = key_of(client.plugin(), client.devices(), program, options);
  const auto file = folder_ / key;
  try {
    if (const auto bytes = is_there(file) ? program_in(file, key) : std::nullopt) {
      if (auto loaded = client.load(*bytes, program, options)) return {*loaded, true};
    }
  } catch (const IoError& error) {
    warn_once(error);
  }
  auto executable = client.compile(program, options);
  keep(key, executable.compiled());
  return {std::move(executable), false};
}

void ProgramCache::keep(const Plugin& plugin, const std::vector<DeviceDescription>& devices, const Program& program, const CompileOptions& options,
                        const CompiledProgram& compiled) const {
  keep(key_of(plugin, devices, program, options), compiled);
}

void ProgramCache::keep(const std::string& key, const CompiledProgram& compiled) const {
  const auto file = folder_ / key;
  try {
    std::error_code failed;
    make_folder(folder_);
    const auto bytes = compiled.serialized();
    const auto header = header_of(key, bytes);
    // Other processes may write the same program: each writes a file with a name of its own, and the last rename wins.
    const auto own = folder_ / fmt::format("{}.{:08x}", key, std::random_device()());
    NewFile written(own);
    written.write(std::as_bytes(std::span(header)));
    written.write(std::as_bytes(std::span(bytes)));
    written.commit();
    std::filesystem::rename(own, file, failed);
    if (failed) throw IoError("can't rename {} to its final name: {}", own, failed.message());
  } catch (const Error& error) {
    warn_once(error);
  }
}

}  // namespace tessera::pjrt
