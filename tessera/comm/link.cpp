#include "tessera/comm/link.h"

#include <cstring>

namespace tessera {

void copy_own(ConstBytes own, Bytes target) {
  if (!own.empty() && own.data() != target.data()) std::memcpy(target.data(), own.data(), own.size());
}

}  // namespace tessera
