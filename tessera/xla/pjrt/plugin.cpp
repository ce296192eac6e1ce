#include "tessera/xla/pjrt/plugin.h"

#include <c10/core/ScalarType.h>
#include <dlfcn.h>
#include <glob.h>

#include <algorithm>
#include <array>
#include <set>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/xla/pjrt/api.h"

namespace tessera::pjrt {
namespace {

struct KnownWheel {
  const char* name;
  const char* wheel;
  const char* file;  // its path below site-packages, which may have wildcards
};

constexpr std::array kKnownWheels = {
    KnownWheel{"cpu", "xla-cpu-pjrt", "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"},
    KnownWheel{"cpu", "lammps-jax-pjrt-cpu", "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so"},
    KnownWheel{"tpu", "libtpu", "libtpu/libtpu.so"},
    KnownWheel{"cuda", "jax-cuda13-pjrt", "jax_plugins/xla_cuda*/xla_cuda_plugin.so"},
};

std::vector<std::filesystem::path> matches(const std::string& pattern) {
  std::vector<std::filesystem::path> paths;
  ::glob_t found{};
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  return paths;
}

/// Returns the Python environment of the first python3 in PATH.
std::filesystem::path python_in_path() {
  const auto path = env("PATH").value_or("");
  for (size_t begin = 0; begin < path.size();) {
    const auto end = std::min(path.find(':', begin), path.size());
    const std::filesystem::path folder = path.substr(begin, end - begin);
    if (std::error_code ignored; std::filesystem::exists(folder / "python3", ignored)) return folder.parent_path();
    begin = end + 1;
  }
  return {};
}

std::vector<std::filesystem::path> folders_of_packages() {
  std::vector<std::filesystem::path> folders;
  ::Dl_info torch{};
  if (::dladdr(reinterpret_cast<const void*>(&c10::GetAllocator), &torch) && torch.dli_fname) {  // site-packages/torch/lib/libc10.so
    folders.push_back(std::filesystem::path(torch.dli_fname).parent_path().parent_path().parent_path());
  }
  for (const auto& prefix : {std::filesystem::path(env("VIRTUAL_ENV").value_or("")), python_in_path(), std::filesystem::path("/usr/local"),
                             std::filesystem::path("/usr"), std::filesystem::path(env("HOME").value_or("")) / ".local"}) {
    if (prefix.empty()) continue;
    for (const auto* packages : {"site-packages", "dist-packages"}) {
      for (auto& folder : matches((prefix / "lib" / "python3*" / packages).string())) folders.push_back(std::move(folder));
    }
  }
  return folders;
}

}  // namespace

std::vector<InstalledPlugin> installed_plugins() {
  std::vector<InstalledPlugin> plugins;
  std::set<std::filesystem::path> seen;
  for (const auto& folder : folders_of_packages()) {
    for (const auto& wheel : kKnownWheels) {
      for (auto& file : matches((folder / wheel.file).string())) {
        std::error_code missing;
        file = std::filesystem::canonical(file, missing);
        if (!missing && seen.insert(file).second) plugins.push_back({wheel.name, wheel.wheel, file});
      }
    }
  }
  return plugins;
}

Plugin Plugin::load(const std::string& name_or_path) {
  if (name_or_path.find('/') != std::string::npos || name_or_path.ends_with(".so")) return Plugin(Api::load(name_or_path));
  const auto plugins = installed_plugins();
  const auto found = std::ranges::find(plugins, name_or_path, &InstalledPlugin::name);
  if (found != plugins.end()) return Plugin(Api::load(found->file));
  std::vector<std::string> wheels;
  for (const auto& known : kKnownWheels) {
    if (name_or_path == known.name) wheels.emplace_back(known.wheel);
  }
  if (wheels.empty()) {
    throw ConfigError("no PJRT plugin is named '{}': name cpu, tpu or cuda, or give the path of a plugin's library", name_or_path);
  }
  throw ConfigError("no PJRT plugin for '{}' is installed: run `pip install {}`, or set TESSERA_PJRT_PLUGIN to the path of a plugin's library",
                    name_or_path, joined(wheels, "` or `pip install "));
}

Plugin Plugin::load() {
  return load(env("TESSERA_PJRT_PLUGIN").value_or("cpu"));
}

const std::filesystem::path& Plugin::file() const {
  return api_->file();
}

std::string Plugin::version() const {
  return api_->version();
}

Options Plugin::attributes() const {
  const auto all = api_->call("describe itself", &PJRT_Api::PJRT_Plugin_Attributes);
  return from_named_values(all.attributes, all.num_attributes);
}

}  // namespace tessera::pjrt
