// The version of these headers, which CMakeLists.txt reads here. tessera::version() is the version of the loaded library.
#pragma once

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 3
#define TESSERA_VERSION_PATCH 0
#define TESSERA_VERSION "0.3.0"

// Programs that link tessera::models, tessera::vision or tessera::xla are compiled with TESSERA_HAS_MODELS=1, TESSERA_HAS_VISION=1 or
// TESSERA_HAS_XLA=1. The headers of Tessera do not look at these macros.

namespace tessera {

/// Returns the version of the library that this process has loaded, such as "0.3.0".
const char* version() noexcept;

}  // namespace tessera
