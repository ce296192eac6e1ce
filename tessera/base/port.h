// A free port for the ranks' rendezvous.
#pragma once

namespace tessera {

/// A port of this host that no process uses at the moment; another process may take it before the caller does. Throws IoError.
int free_port();

}  // namespace tessera
