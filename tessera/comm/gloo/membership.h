// Keeps strangers out of gloo's connections: ranks prove to each other that they know the secret, and gloo's listeners then go deaf.
#pragma once

#include <set>

#include "tessera/comm/host/rendezvous.h"

namespace c10d {
class Backend;
}

namespace tessera {

/// Collective: each rank proves to each other rank, over the connection between them, that it knows the job's secret. Throws CommError that
/// names the rank whose connection leads to somebody else. Nobody else may use the backend yet.
void prove_membership(c10d::Backend& backend, const StorePtr& store, Clock::time_point end);

/// The descriptors of this process's sockets that listen for TCP connections.
std::set<int> listening_sockets();
/// Lets the kernel drop all further attempts to connect to a socket that listens. gloo keeps each connection that it accepts, even after
/// the other side has closed it, and when descriptors run out, it ends the process.
void deafen(int listener);

}  // namespace tessera
