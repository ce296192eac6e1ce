// The version of the library; its header is tessera/version.h.
#include "tessera/version.h"

namespace tessera {

const char* version() noexcept {
  return TESSERA_VERSION;
}

}  // namespace tessera
