// Which libtorch the process has loaded, and whether it has the ABI of the one that Tessera was built with.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// The version of the loaded libtorch, such as "2.13.0". Empty if that libtorch does not say it.
std::string loaded_libtorch();

/// Throws UsageError unless `loaded` has the major and minor version with which Tessera was built. Patch versions have the same headers and
/// symbols; other minor versions have classes of another layout, which no linker notices.
void expect_fitting_libtorch(std::string_view loaded = loaded_libtorch());

}  // namespace tessera
