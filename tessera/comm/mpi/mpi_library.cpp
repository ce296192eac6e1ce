#include "tessera/comm/mpi/mpi_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <mutex>
#include <string_view>

#include "tessera/base/env.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

/// A library whose module a build can have.
struct KnownMpi {
  std::string_view module;
  std::string_view version;  // how its version text begins
  std::string_view package;
};
constexpr std::array kKnownMpis = {
    KnownMpi{.module = "openmpi", .version = "Open MPI", .package = "libopenmpi-dev"},
    KnownMpi{.module = "mpich", .version = "MPICH", .package = "libmpich-dev"},
};

/// The version text of the MPI that the program has loaded; empty if it has loaded none.
std::string loaded_mpi() {
  constexpr size_t kLongest = 8192;  // as both libraries have it at most
  auto* const ask = reinterpret_cast<int (*)(char*, int*)>(::dlsym(RTLD_DEFAULT, "MPI_Get_library_version"));
  std::string text(kLongest, '\0');
  int length = 0;
  if (ask == nullptr || ask(text.data(), &length) != 0) return {};
  return text.substr(0, std::min<size_t>(static_cast<size_t>(length), text.find_first_of(",\n")));
}

const KnownMpi& chosen_mpi() {
  if (const auto loaded = loaded_mpi(); !loaded.empty()) {
    for (const auto& known : kKnownMpis) {
      if (loaded.starts_with(known.version)) return known;
    }
    throw ConfigError("the program uses {}, but Tessera knows only Open MPI and MPICH; take another transport", loaded);
  }
  if (env("OMPI_COMM_WORLD_SIZE") || env("PMIX_RANK")) return kKnownMpis[0];
  if (env("PMI_RANK")) return kKnownMpis[1];
  throw ConfigError("no MPI has started this process; start the program with mpirun -n N in place of another launcher");
}

/// The folder of the modules, beside the library that has this function.
std::filesystem::path folder_of_modules() {
  Dl_info info = {};
  if (::dladdr(reinterpret_cast<const void*>(&mpi_calls), &info) == 0 || info.dli_fname == nullptr) return "tessera";
  return std::filesystem::path(info.dli_fname).parent_path() / "tessera";
}

MpiCalls& loaded_calls() {
  const auto& known = chosen_mpi();
  const auto file = folder_of_modules() / fmt::format("libtessera_{}.so", known.module);
  if (!std::filesystem::exists(file)) {
    throw ConfigError("this build has no module for {}; build Tessera where {} is installed", known.version, known.package);
  }
  // Global, because components of Open MPI look for its symbols in the process.
  auto* const module = ::dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (module == nullptr) throw ConfigError("the module for {} can't be loaded: {}", known.version, ::dlerror());
  return *reinterpret_cast<MpiFactory>(::dlsym(module, kMpiFactory))();
}

}  // namespace

std::string why_no_mpi() try {
  mpi_calls();
  return {};
} catch (const ConfigError& error) {
  return error.what();
}

MpiCalls& mpi_calls() {
  static auto& calls = loaded_calls();  // an exception leaves it for the next call
  return calls;
}

}  // namespace tessera
